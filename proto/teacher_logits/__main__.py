"""The command ``teacher-logits``: finds each side's commands by entry point and runs one.

Server and client stay strangers: a command is whatever an installed package registers in
the group ``teacher_logits.commands`` as a function ``(argv) -> exit code``.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from teacher_logits import __version__
from teacher_logits.errors import TeacherLogitsError

GROUP = "teacher_logits.commands"

_WORDS = {
    "bench": "measure this machine",
    "demo": "a teacher, and a student that learns from it, in a few minutes",
    "doctor": "find what stands in the way of sharing memory, and how to mend it",
    "inspect": "show what a running server holds",
    "serve": "run a teacher's server",
    "top": "watch a running server",
}
"""A few words on each command that is ours; others are listed by name."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 called wrongly, 130 stopped.

    A command may have further ones of its own.
    """
    arguments = sys.argv[1:] if argv is None else argv
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not arguments or arguments[0] in {"-h", "--help"}:
        _write(_usage(sorted(commands)))
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] in {"-V", "--version"}:
        _write(f"teacher-logits {__version__}")
        return EXIT_OK
    point = commands.get(arguments[0])
    if point is None:
        _write(f"no command {arguments[0]!r}\n\n{_usage(sorted(commands))}", error=True)
        return EXIT_USAGE
    try:
        return int(point.load()(arguments[1:]))
    except TeacherLogitsError as error:
        _write(f"teacher-logits {arguments[0]}: {error.message}", error=True)
        return EXIT_USAGE if error.reason == "CONFIG" else EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _usage(names: list[str]) -> str:
    lines = ["usage: teacher-logits COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<9} {_WORDS.get(name, '')}".rstrip() for name in names]
    lines += ["", "`teacher-logits COMMAND --help` says what a command takes."]
    return "\n".join(lines)


def _write(text: str, *, error: bool = False) -> None:
    (sys.stderr if error else sys.stdout).write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
