"""The units of systemd, by systemd's own tools: verify, the rating of the hardening, sysusers.

`systemd-analyze` looks for the programs that a unit starts; the one of ours is stood in for.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from deploy.checks import find_tool, lines_of

MOST_EXPOSED = 15
"""Tenths of systemd's rating, of which 100 is a service without any hardening."""
PROGRAM = re.compile(r"/opt/teacher-logits/bin/\S+")
UNIT = "teacher-logits.service"
_FROM = "systemd (Debian)"
_RATING = re.compile(r"Overall exposure level for \S+: (\d+)\.(\d)")


def check_units(folder: Path) -> list[str]:
    """Verify the service, alone and with each of its drop-ins."""
    analyze = find_tool("systemd-analyze", comes_from=_FROM)
    sysusers = find_tool("systemd-sysusers", comes_from=_FROM)
    place = folder / "systemd"
    found: list[str] = []
    for drop_in in (None, *sorted((place / f"{UNIT}.d").glob("*.conf"))):
        with tempfile.TemporaryDirectory(prefix="units-") as copy:
            unit = _copy(place / UNIT, Path(copy))
            if drop_in is not None:
                _copy(drop_in, Path(copy) / f"{UNIT}.d")
            found += [line.replace(f"{copy}/", "") for line in lines_of(analyze, "verify", unit)]
            if drop_in is None and not found:
                found += _rating(analyze, unit)
    for path in sorted(place.glob("*.sysusers.conf")):
        said = lines_of(sysusers, "--dry-run", str(path))
        found += [line for line in said if path.name in line or "ended with" in line]
    return found


def _copy(path: Path, folder: Path) -> str:
    """Copy a unit, with a program that is there in the place of ours; return its path."""
    stand_in = shutil.which("true") or "/bin/true"
    folder.mkdir(exist_ok=True)
    copy = folder / path.name
    copy.write_text(PROGRAM.sub(stand_in, path.read_text("utf-8")), "utf-8")
    return str(copy)


def _rating(analyze: str, unit: str) -> list[str]:
    said = "\n".join(lines_of(analyze, "security", "--offline=true", "--no-pager", unit))
    rating = _RATING.search(said)
    if rating is None:
        return [f"{UNIT}: systemd-analyze security gives no rating"]
    exposed = int(rating[1] + rating[2])
    if exposed > MOST_EXPOSED:
        return [f"{UNIT}: exposure {exposed / 10}, more than {MOST_EXPOSED / 10}"]
    return []
