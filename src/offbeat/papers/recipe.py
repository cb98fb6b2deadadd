"""What recipes share: their settings, what they make, how cells are chosen and run, and how results are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from offbeat.config import Experiment
from offbeat.engines.engine import BadNumbers
from offbeat.errors import ConfigError
from offbeat.experiment import run
from offbeat.runs import report
from offbeat.runs.loop import Outcome
from offbeat.runs.progress import Progress

SCALES = ("smoke", "small", "full")
SMOKE = "scale smoke: digits and a few commits, to see that it runs; the figures mean nothing"

T = TypeVar("T")


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


def begun(settings: Settings, title: str, columns: Sequence[str], notes: Sequence[str] = ()) -> Made:
    """An empty table, to be filled cell by cell."""
    title = f"{title} ({settings.scale}, {settings.seeds} seed(s))"
    return Made([TableMade(title, columns, [])], notes=[*([SMOKE] if settings.scale == "smoke" else []), *notes])


def pick(cells: Mapping[str, T], settings: Settings) -> dict[str, T]:
    """The cells that --only lets through. A cell's name is a word of each kind; words of one kind are alternatives.

    >>> pick({"iid fedbuff": 1, "iid asysg": 2, "non-iid asysg": 3}, Settings(only=("asysg", "iid")))
    {'iid asysg': 2}
    """
    words = {word for given in settings.only for word in given.split()}
    kinds = [dict.fromkeys(kind) for kind in zip(*(name.split() for name in cells), strict=True)]
    wanted = [words & kind.keys() or kind.keys() for kind in kinds]
    picked = {name: cell for name, cell in cells.items()
              if all(word in kind for word, kind in zip(name.split(), wanted, strict=True))}  # fmt: skip
    if not picked or not words <= {word for kind in kinds for word in kind}:
        known = "; ".join(" ".join(kind) for kind in kinds)
        raise ConfigError([f"--only {' '.join(settings.only)} fits nothing here; the words are: {known}"])
    return picked


def run_cell(experiment: Experiment, label: str) -> Outcome:
    """Run one experiment; one that diverges is a result too."""
    try:
        return run(experiment, None, Progress(label, experiment.until))
    except BadNumbers as error:
        outcome: Outcome = error.outcome
        return outcome


def write(made: Made, settings: Settings, name: str) -> None:
    """The table and the remarks as Markdown, and a line of JSON for each run."""
    table, figures = made.tables[0], settings.out / f"{name}.json"
    text = report.write_table(settings.out / f"{name}.md", table.title, table.columns, table.rows)
    with text.open("a") as file:
        file.writelines(f"\n{note}\n" for note in made.notes)
    figures.write_text("[\n" + ",\n".join(map(json.dumps, made.figures)) + "\n]\n")
    made.files += [path for path in (text, figures) if path not in made.files]
