"""A recipe is data: the cells of a table or figure, the paper's figures for them, and what the paper states in words.

A cell is one run with one seed: an experiment (`Training`) or a measuring job. `runner` runs cells, `ledger` keeps
their records, `agreement` lays them beside the paper's figures, `page` writes them down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from offbeat.errors import ConfigError, unknown
from offbeat.experiments.experiment import Experiment
from offbeat.runs.folder import file_name
from offbeat.tasks.task import Task

SIZES = ("smoke", "small", "full")
EACH_COMMIT = {"every_commits": 1}
PACES: dict[str, dict[str, float]] = {  # client-steps a second: results/speed.md and the wall times of stored runs
    "h200": {"lr": 1.1e6, "mlp": 3.7e5, "cnn": 8.5e4, "cifar-cnn": 5e4, "sequential": 6.9e3,
             "fedavg-cnn": 7.0e3, "heterogeneity-cnn": 6e3, "alexnet": 6.2e3, "vgg19": 1.0e3, "vgg16": 1.2e3,
             "quadratic": 2e4},
    "cpu": {"lr": 4.3e4, "mlp": 4.2e3, "cnn": 2.9e2, "cifar-cnn": 1.6e2, "sequential": 2.4e2,
            "fedavg-cnn": 4e1, "heterogeneity-cnn": 3e1, "alexnet": 2e1, "vgg19": 2.0, "vgg16": 2.5, "quadratic": 2e4},
}  # fmt: skip
Record = dict[str, Any]
Records = Mapping[str, Sequence[Record]]  # by the cell's name, one for each seed
T = TypeVar("T")


class Run(NamedTuple):
    """How a cell is run."""

    size: str = "full"
    seed: int = 0
    device: str = "auto"
    precision: Any = "float32"


@dataclass(frozen=True)
class Training:
    """An experiment at the paper's size. `task` is a table, or makes a task where no table can say it.

    `client_steps` is about what it takes, for the estimate of its cost at the rate of its kind of model, `pace`.
    """

    method: Mapping[str, Any]
    task: Mapping[str, Any] | Callable[[Run], Task]
    fleet: Any
    until: Mapping[str, float]
    evaluate: Mapping[str, float] = field(default_factory=lambda: EACH_COMMIT)
    targets: tuple[float, ...] = ()
    client_steps: float = 0.0
    pace: str = "cnn"
    training_looks: int = 0  # at every so many looks the training loss is taken too; 0: never
    precision: Any = None  # its own, whatever the run's is

    def experiment(self, run: Run) -> Experiment:
        task = self.task if isinstance(self.task, Mapping) else self.task(run)
        made = Experiment(
            method=self.method, task=task, fleet=self.fleet, seed=run.seed, device=run.device, until=self.until,
            precision=self.precision or run.precision, evaluate=self.evaluate, targets=self.targets,
        )  # fmt: skip
        return made if run.size == "full" else smaller(made, run.size)


CUT = {"small": (10, 1, 10), "smoke": (100, 10, 4)}  # what laws and steps are divided by, and the most commits


def smaller(given: Experiment, size: str) -> Experiment:
    """The same experiment, cut short; at the smoke size on the embedded digits with a small model."""
    law, steps, commits = CUT[size]
    method, fleet = dict(given.method), given.fleet
    if method.get("local_steps"):
        method["local_steps"] = max(2, method["local_steps"] // steps)
        method |= {"gossip_every": min(method["gossip_every"], 2)} if "gossip_every" in method else {}
    if isinstance(fleet, Mapping) and "local_steps" in fleet:
        fleet = {**fleet, "local_steps": divided(fleet["local_steps"], law)}
    if size == "small":
        most = {"commits": commits, "virtual_seconds": 10.0}
        until = {name: min(limit, most.get(name, limit)) for name, limit in given.until.items()}
        return replace(given, method=method, fleet=fleet, until=until)
    task, looks = given.task, given.evaluate
    if isinstance(task, Mapping):
        linear = task.get("model") in ("logistic", "linear")
        kept = {name: task[name] for name in ("clients", "split", "batch_size", "sampling") if name in task}
        task = {**kept, "name": "digits", "model": "logistic" if linear else {"name": "mlp", "hidden": 16}}
        if kept.get("split") == {"name": "natural", "fewer": "grouped"}:
            task["split"] = "iid"
    if "every_seconds" in looks:
        looks, commits = {"every_seconds": 0.05}, 6
    return replace(given, method=method, fleet=fleet, task=task, until={"commits": commits}, evaluate=looks)


def divided(law: Mapping[str, Any], by: int) -> dict[str, Any]:
    """A step law whose numbers are so many times smaller."""
    return {name: value if isinstance(value, str) or by == 1 else value / by**2 if name == "variance"
            else max(1, round(value / by)) for name, value in law.items()}  # fmt: skip


class Stated(NamedTuple):
    """What a paper states, and where: `path` in the experiments of a recipe (of the cells with the words `only`) has
    one of the values. A test holds every recipe against its statements."""

    path: str
    values: tuple[Any, ...]
    where: str
    only: str = ""

    def at(self, work: Training) -> Any:
        """What an experiment has there, e.g. at "task.split.alpha"; None where it has nothing."""
        first, *names = self.path.split(".")
        value = getattr(work, first)
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class Cell:
    """One run of a recipe. The words of its name are of the recipe's kinds, one of each.

    `paper` has the paper's figures by the name of the value; infinity: not within the limit. Lower `priority` is run
    first. `home` is the recipe that runs it and keeps its records: figures may show the cells of a table, under their
    name there (`alias`) where it differs. `origin` is how `offbeat paper` finds that recipe.
    """

    name: str
    work: Training | Callable[[Run], Record]
    paper: Mapping[str, float] = field(default_factory=dict)
    priority: int = 5
    home: str = ""
    alias: str = ""
    origin: str = ""
    client_steps: float = 0.0  # of a measuring job
    pace: str = "cnn"

    @property
    def words(self) -> list[str]:
        return self.name.split()

    @property
    def record(self) -> str:
        """The name that its records have."""
        return self.alias or self.name

    @property
    def cost(self) -> tuple[float, str]:
        """Client-steps, and of which model."""
        return (self.work.client_steps, self.work.pace) if isinstance(self.work, Training) else (
            self.client_steps, self.pace)  # fmt: skip


class Claim(NamedTuple):
    """A sentence of a paper on a figure: the value of one cell against that of another, `ratio` times as large, or,
    with `above` alone, larger (True) or smaller (False)."""

    text: str
    value: str
    cell: str
    other: str
    ratio: float | None = None
    above: bool = True

    @property
    def larger(self) -> bool:
        return self.above if self.ratio is None else self.ratio > 1


Picture = Callable[["Recipe", Records, Path], list[Path]]


@dataclass(frozen=True)
class Recipe:
    """One table or figure. Tables have a row for what `across` does not lay along the columns: a kind, or the values.

    Order is compared between cells that differ in one word, but never across the kinds in `apart`.
    """

    name: str
    title: str
    about: str
    kinds: tuple[str, ...]
    cells: tuple[Cell, ...]
    values: tuple[str, ...]
    across: str = "value"
    apart: tuple[str, ...] = ()
    seeds: int = 3  # of the paper
    few: tuple[str, ...] = ()  # the words of --only at the smoke size, where none are given
    stated: tuple[Stated, ...] = ()
    notes: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    picture: Picture | None = None
    small_table: bool = True  # whether the page shows the table, or the picture alone
    origin: str = ""  # how `offbeat paper` finds it: its name, or module:name

    def __post_init__(self) -> None:
        object.__setattr__(self, "origin", self.origin or self.name)
        cells = tuple(
            replace(cell, home=self.name, origin=self.origin) if cell.home in ("", self.name) else cell
            for cell in self.cells
        )
        object.__setattr__(self, "cells", cells)

    def problems(self) -> list[str]:
        """What is impossible about a recipe of one's own."""
        problems = [] if file_name(self.name) == self.name else [f"its name '{self.name}' is no name of a file"]
        twice = [name for name, many in Counter(cell.name for cell in self.cells).items() if many > 1]
        problems += [f"cell '{name}' is there twice" for name in twice]
        problems += [
            f"cell '{cell.name}' has {len(cell.words)} words, for the kinds {', '.join(self.kinds)}; give one of each"
            for cell in self.cells if len(cell.words) != len(self.kinds)
        ]  # fmt: skip
        paces = dict.fromkeys(cell.cost[1] for cell in self.cells)
        problems += [unknown("pace", pace, PACES["cpu"]) for pace in paces if pace not in PACES["cpu"]]
        return problems if self.cells else [*problems, "it has no cells"]

    @property
    def short(self) -> str:
        return self.name.partition("-")[2] or self.name

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)

    def chosen(self, settings: Settings) -> list[Cell]:
        """The cells that --only and --n let through."""
        words = settings.only or (self.few if settings.scale == "smoke" and not settings.n else ())
        if settings.n:
            known = (
                sorted({int(cell.words[self.kinds.index("n")][2:]) for cell in self.cells}) if "n" in self.kinds else []
            )
            if not known:
                raise ConfigError([f"--n {settings.n[0]}; {self.name} takes no --n"])
            if lacking := [n for n in settings.n if n not in known]:
                said = ", ".join(map(str, known))
                raise ConfigError([f"--n {lacking[0]}; Table 1 has rates for n = {said} here"])
            words = (*words, *(f"n={n}" for n in settings.n))
        return list(pick({cell.name: cell for cell in self.cells}, words).values())


@dataclass(frozen=True)
class Settings:
    """The flags of `offbeat paper`."""

    only: tuple[str, ...] = ()
    n: tuple[int, ...] = ()
    seeds: int | None = None
    device: str = "auto"
    precision: Any = "float32"
    scale: str = "small"
    out: Path = Path("runs/papers")
    seed: int | None = None
    workers: int | None = None  # cells side by side, by Ray; None: one after the other, here
    address: str | None = None

    def __post_init__(self) -> None:
        if self.scale not in SIZES:
            raise ConfigError([f"--scale {self.scale}; it is one of {', '.join(SIZES)}"])
        for place in (self.out, *self.out.parents):
            if place.exists() and not place.is_dir():
                raise ConfigError([f"--out {self.out}: {place} is a file; give a directory"])

    def runs(self, seeds: int = 1) -> list[Run]:
        """One for each seed; so many where the flags do not say."""
        numbers = range(self.seeds or seeds) if self.seed is None else [self.seed]
        return [Run(self.scale, seed, self.device, self.precision) for seed in numbers]


class Table(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: list[list[str]]


@dataclass
class Made:
    """What a recipe made: tables to show, files written, remarks, and the records of its runs."""

    tables: list[Table] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Record] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return {"figures": self.figures, "files": [str(path) for path in self.files], "notes": self.notes}


def pick(cells: Mapping[str, T], only: Sequence[str]) -> dict[str, T]:
    """The cells that --only lets through. A cell's name is a word of each kind; words of one kind are alternatives.

    >>> pick({"iid fedbuff": 1, "iid asysg": 2, "non-iid asysg": 3}, ("asysg", "iid"))
    {'iid asysg': 2}
    """
    words = {word for given in only for word in given.split()}
    kinds = [dict.fromkeys(kind) for kind in zip(*(name.split() for name in cells), strict=True)]
    wanted = [words & kind.keys() or kind.keys() for kind in kinds]
    picked = {name: cell for name, cell in cells.items()
              if all(word in kind for word, kind in zip(name.split(), wanted, strict=True))}  # fmt: skip
    if not picked or not words <= {word for kind in kinds for word in kind}:
        known = "; ".join(" ".join(kind) for kind in kinds)
        raise ConfigError([f"--only {' '.join(only)} fits nothing here; the words are: {known}"])
    return picked
