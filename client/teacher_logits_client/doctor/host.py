"""Settings of the machine's kernel that matter here: ptrace, and watches of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from teacher_logits_client.doctor.findings import Finding, Verdict

_PTRACE = "kernel/yama/ptrace_scope"
_INSTANCES = "fs/inotify/max_user_instances"
_WATCHES = "fs/inotify/max_user_watches"
_USUAL_INSTANCES = 128
_SCOPES = {
    0: "a user's processes may trace one another",
    1: "a process may trace its own children alone",
    2: "only an administrator may trace",
    3: "nobody may trace",
}


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """What /proc/sys says; None where it does not say."""

    ptrace_scope: int | None
    inotify_instances: int | None
    inotify_watches: int | None


def read_kernel_settings(folder: Path = Path("/proc/sys")) -> KernelSettings:
    """Read the settings in a folder laid out as /proc/sys."""
    return KernelSettings(
        ptrace_scope=_number(folder / _PTRACE),
        inotify_instances=_number(folder / _INSTANCES),
        inotify_watches=_number(folder / _WATCHES),
    )


def host_findings(settings: KernelSettings) -> list[Finding]:
    """Judge the settings; one finding a subject."""
    return [ptrace_finding(settings.ptrace_scope), inotify_finding(settings)]


def ptrace_finding(scope: int | None) -> Finding:
    """Say who may trace whom, which nothing here needs."""
    if scope is None:
        return Finding(
            name="ptrace_scope",
            verdict=Verdict.OK,
            message="the kernel does not restrict tracing further (no Yama)",
        )
    return Finding(
        name="ptrace_scope",
        verdict=Verdict.OK,
        message=f"{scope}: {_SCOPES.get(scope, 'unknown')}; for information only: slabs are passed "
        "over the broker's socket, and nobody takes descriptors out of another process, as torch "
        "does to share expandable segments",
        facts={"scope": scope},
    )


def inotify_finding(settings: KernelSettings) -> Finding:
    """Judge how many files one user may watch; whether one is left is tried (``file_watch``)."""
    instances, watches = settings.inotify_instances, settings.inotify_watches
    if instances is None or watches is None:
        return Finding(
            name="inotify", verdict=Verdict.OK, message="its limits cannot be seen from here"
        )
    is_low = instances < _USUAL_INSTANCES or watches < _USUAL_INSTANCES
    return Finding(
        name="inotify",
        verdict=Verdict.WARN if is_low else Verdict.OK,
        message=f"a user has {instances:,} instances and {watches:,} watches; a session that "
        "shares memory with its publishers takes one instance",
        cure="sysctl fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=8192: a "
        "session that gets none has its steps from the server once they are sealed, a little later"
        if is_low
        else "",
        facts={"max_user_instances": instances, "max_user_watches": watches},
    )


def _number(path: Path) -> int | None:
    try:
        text = path.read_text("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
