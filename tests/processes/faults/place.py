"""The folder of a cast."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The folder of a cast: ``run`` holds the sockets and nothing else, ``logs`` what roles say."""

    folder: Path

    def __post_init__(self) -> None:
        for each in (self.run, self.logs):
            each.mkdir(exist_ok=True)

    @property
    def run(self) -> Path:
        """Where the server's sockets are."""
        return self.folder / "run"

    @property
    def logs(self) -> Path:
        """Where the roles write."""
        return self.folder / "logs"

    @property
    def address(self) -> str:
        """Where the server listens."""
        return f"unix:{self.run / 's'}"

    def said(self) -> str:
        """Return the end of every log, for the report of a failure."""
        parts = [f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.logs.iterdir())]
        return "\n".join(parts)
