"""What recipes share: their settings, what they make, and how a cell is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError

SCALES = ("smoke", "small", "full")


@dataclass(frozen=True)
class Settings:
    """The flags of `offbeat paper`."""

    only: tuple[str, ...] = ()
    n: tuple[int, ...] = ()
    seeds: int = 1
    device: str = "auto"
    precision: Any = "float32"
    scale: str = "small"
    out: Path = Path("runs/papers")

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ConfigError([f"--scale {self.scale}; it is one of {', '.join(SCALES)}"])
        for place in (self.out, *self.out.parents):
            if place.exists() and not place.is_dir():
                raise ConfigError([f"--out {self.out}: {place} is a file; give a directory"])


@dataclass(frozen=True)
class TableMade:
    title: str
    columns: Sequence[str]
    rows: list[list[str]]


@dataclass
class Made:
    """What a recipe made: tables to show, files written, remarks, and the figures themselves."""

    tables: list[TableMade] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return {"figures": self.figures, "files": [str(path) for path in self.files], "notes": self.notes}
