"""Runs the cells of recipes: one record for each cell and seed, whatever the run came to."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from offbeat.errors import BadNumbers, Interrupted, OffbeatError
from offbeat.experiments.assemble import build
from offbeat.experiments.experiment import Experiment
from offbeat.papers import agreement
from offbeat.papers.ledger import Ledger, estimate, kind_of
from offbeat.papers.recipe import Cell, Made, Recipe, Record, Run, Settings, Training
from offbeat.runs.loop import go
from offbeat.runs.outcome import Outcome
from offbeat.runs.progress import Progress

SMOKE = "scale smoke: digits and a few commits, to see that it runs; the figures mean nothing"
POINTS = 120  # of a curve that is kept
KEPT = ("method", "task", "fleet", "device", "precision", "ended", "commits", "virtual_seconds", "client_steps",
        "samples", "bytes_up", "bytes_down", "bytes_d2d", "updates_consumed", "idle_share", "share_dead")  # fmt: skip


def watched(experiment: Experiment, looks: int, label: str) -> Outcome:
    """Run an experiment; at every `looks`-th look the training loss is taken too. One that diverges is a result."""
    built = build(experiment)
    engine = built.engine()
    plain, losses = engine.evaluate, list[float | None]()

    def both() -> dict[str, Any]:
        due = looks and len(losses) % looks == 0
        losses.append(engine.training_loss() if due else None)
        return plain()

    engine.evaluate = both  # type: ignore[method-assign]
    progress = Progress(label, experiment.until)
    try:
        outcome = go(experiment, built, engine, built.horizon(built.clock()), built.account(), None, progress)
    except BadNumbers as error:
        outcome = error.outcome
    for row, loss in zip(outcome.metrics, losses, strict=False):
        row["training_loss"] = loss
    return outcome


def train(work: Training, run: Run, label: str) -> Record:
    """The record of an experiment: figures of the run, values that tables may show, and its curve."""
    experiment = work.experiment(run)
    outcome = watched(experiment, work.training_looks, label)
    result, rows = outcome.result, outcome.metrics
    failed = result["ended"] if result["ended"].startswith("stopped") else None
    target = str(next(iter(experiment.targets))) if experiment.targets else None
    reached, smooth = (result[name].get(target) or {} for name in ("reached", "reached_smoothed"))
    seconds = reached.get("virtual_seconds")
    seen = [row["accuracy"] for row in rows[1:] if row["accuracy"] is not None]
    losses = [row["training_loss"] for row in rows if row["training_loss"] is not None]
    values = {
        "best": result["accuracy_best"], "accuracy": None if failed else result["accuracy_final"],
        "last 10": None if failed or not seen else mean(seen[-10:]), "loss": None if failed else result["loss_final"],
        "training loss": losses[-1] if losses and not failed else None,
        "commits": result["commits"], "total hours": result["virtual_seconds"] / 3600,
    }  # fmt: skip
    if target:
        values |= {"seconds": seconds, "rounds": reached.get("commit"), "smoothed": smooth.get("virtual_seconds"),
                   "hours": None if seconds is None else seconds / 3600}  # fmt: skip
    curve = [[row["commit"], round(row["virtual_seconds"], 4), row["accuracy"], significant(row["loss"]),
              significant(row["training_loss"])] for row in thinned(rows)]  # fmt: skip
    return {"values": values, "failed": failed, "target": target, "curve": curve,
            **{name: result[name] for name in KEPT}}  # fmt: skip


def significant(value: float | None) -> float | None:
    return value if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def thinned(rows: Sequence[Any], most: int = POINTS) -> list[Any]:
    """At most so many of the rows, evenly, with the first, the last and every look at the training loss among the few.

    >>> thinned(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def play(cell: Cell, run: Run) -> Record:
    """Run a cell. A run that breaks down is recorded with its reason; missing data and bad options are not results."""
    began, label = time.perf_counter(), f"{cell.home} {cell.name} seed {run.seed}"
    try:
        record = train(cell.work, run, label) if isinstance(cell.work, Training) else cell.work(run)
    except RuntimeError as error:  # such as out of memory
        record = {"values": {}, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    device = pick_name(run.device)
    return {"cell": cell.record, "seed": run.seed, "size": run.size, "commit": commit_of(), "device": device,
            "precision": str(run.precision), "torch": torch.__version__, "command": command_of(cell, run),
            "wall_seconds": round(time.perf_counter() - began, 2), **record}  # fmt: skip


def pick_name(device: str) -> str:
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(None if device == "auto" else torch.device(device))


def commit_of() -> str:
    """The commit of this tree: OFFBEAT_COMMIT where it is set, else what git says; + where files differ from it."""
    if named := os.environ.get("OFFBEAT_COMMIT"):
        return named
    here = Path(__file__).parent
    try:
        said = [subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=20).stdout
                for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "."))]  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said[0].strip() + ("+" if said[1].strip() else "")


def command_of(cell: Cell, run: Run) -> str:
    words = f"offbeat paper {cell.origin} --only '{cell.record}' --seed {run.seed} --size {run.size}"
    return f"{words} --device {run.device} --precision {run.precision}"


def make(recipe: Recipe, settings: Settings) -> Made:
    """Run the chosen cells with every seed; tables and files are written after every cell, so a cut run keeps them."""
    made, records = Made(notes=[*([SMOKE] if settings.scale == "smoke" else []), *recipe.notes]), {}
    cells = recipe.chosen(settings)
    runs = settings.runs()
    played = plays([(cell, run) for cell in cells for run in runs], settings)
    for cell in cells:
        records[cell.name] = [next(played) for _ in runs]
        made.figures += records[cell.name]
        title = f"{recipe.title} ({settings.scale}, {len(runs)} seed(s))"
        made.tables = [agreement.table(recipe, records, title)]
        agreement.write(made, settings.out, recipe.short)
    if recipe.picture is not None:
        made.files += recipe.picture(recipe, records, settings.out / f"{recipe.short}.png")
    return made


def plays(pairs: Sequence[tuple[Cell, Run]], settings: Settings) -> Iterator[Record]:
    """The records of cells in order, played one after the other, or side by side on workers."""
    if settings.workers is None:
        for cell, run in pairs:
            yield play(cell, run)
        return
    from offbeat.studies.spread import Call, spread

    calls = [Call(f"{cell.name} seed {run.seed}", play, (cell, run)) for cell, run in pairs]
    done: dict[int, Record] = {}
    turn = 0
    for place, record in spread(calls, settings.workers, settings.address, settings.device, "cells"):
        done[place] = record
        while turn in done:
            yield done.pop(turn)
            turn += 1


# ---- filling in what is missing -------------------------------------------------------------------
def missing(recipes: Sequence[Recipe], kept: Ledger, settings: Settings) -> list[tuple[Cell, Run]]:
    """Cells without a record, the most telling first; those of one shape follow one another. All seeds of a priority
    come before the next priority, seed by seed."""
    lacking: dict[tuple[str, str, int], tuple[Cell, Run]] = {}
    shapes: dict[str, int] = {}
    for recipe in recipes:
        for cell in recipe.chosen(settings):
            shapes.setdefault(cell.cost[1], len(shapes))
            for run in settings.runs(recipe.seeds):
                if not kept.has(cell, run):
                    lacking.setdefault((cell.home, cell.record, run.seed), (cell, run))
    return sorted(lacking.values(), key=lambda pair: (pair[1].seed > 0, pair[0].priority, shapes[pair[0].cost[1]],
                                                    pair[1].seed))  # fmt: skip


def resume(
    recipes: Sequence[Recipe], kept: Ledger, settings: Settings, minutes: float, tell: Callable[[str], None] = print
) -> int:
    """Fill in as many missing cells as fit into so many minutes; gives how many. A cell that would run over the end
    is stopped, and how long it ran is kept for the next estimate."""
    if settings.workers is not None:
        return resume_spread(recipes, kept, settings, minutes, tell)
    end, done, lacking = time.perf_counter() + 60 * minutes, 0, set[str]()
    kind = kind_of(pick_name(settings.device))
    for cell, run in missing(recipes, kept, settings):
        left = end - time.perf_counter()
        seconds, how = estimate(cell, kind, kept)
        if seconds > left or data_of(cell) in lacking:
            continue
        tell(f"{cell.home} {cell.name} seed {run.seed}: about {seconds:.0f} s ({how}), {left:.0f} s left")
        try:
            with ringing(left):
                kept.add(cell, play(cell, run))
        except (KeyboardInterrupt, Interrupted):
            if time.perf_counter() < end:  # somebody else wants an end
                raise Interrupted("interrupted; the records of all cells that were finished are kept") from None
            ran = round(seconds if seconds > left else left, 1)
            kept.add(
                cell,
                {"cell": cell.record, "seed": run.seed, "size": run.size, "cut": ran, "device": pick_name(run.device)},
            )
            tell(f"{cell.home} {cell.name} seed {run.seed}: cut after {ran:.0f} s")
            break
        except OffbeatError as error:
            if "was not found" not in str(error):
                raise
            lacking.add(data_of(cell))
            tell(f"{cell.home} {cell.name}: left out: {str(error).splitlines()[0]}")
            continue
        done += 1
    return done


def resume_spread(
    recipes: Sequence[Recipe], kept: Ledger, settings: Settings, minutes: float, tell: Callable[[str], None]
) -> int:
    """The same on workers: as many cells as the estimates fit into the time of all workers, side by side. Each record
    is kept as it comes; cells that have not ended when the time is over are given up, and stay missing."""
    from offbeat.studies.spread import Call, spread

    assert settings.workers is not None
    end, kind = time.perf_counter() + 60 * minutes, kind_of(pick_name(settings.device))
    room, chosen = 60 * minutes * settings.workers, list[tuple[Cell, Run]]()
    for cell, run in missing(recipes, kept, settings):
        seconds, _ = estimate(cell, kind, kept)
        if seconds <= min(room, 60 * minutes):
            room -= seconds
            chosen.append((cell, run))
    calls = [Call(f"{cell.home} {cell.name} seed {run.seed}", found_or_played, (cell, run)) for cell, run in chosen]
    tell(f"{len(calls)} cells on {settings.workers} workers")
    done = 0
    for place, record in spread(calls, settings.workers, settings.address, settings.device, "cells"):
        if isinstance(record, str):
            tell(f"{calls[place].name}: left out: {record}")
        else:
            kept.add(chosen[place][0], record)
            done += 1
        if time.perf_counter() > end:
            tell("the time is over; cells that were under way stay missing")
            break
    return done


def found_or_played(cell: Cell, run: Run) -> Record | str:
    """The record of a cell, or why its data is not there."""
    try:
        return play(cell, run)
    except OffbeatError as error:
        if "was not found" not in str(error):
            raise
        return str(error).splitlines()[0]


def data_of(cell: Cell) -> str:
    """Which data a cell needs, or its recipe where no table says it."""
    task = cell.work.task if isinstance(cell.work, Training) else None
    return str(task["name"]) if isinstance(task, Mapping) else cell.home


@contextmanager
def ringing(seconds: float) -> Iterator[None]:
    """An interrupt after so many seconds: a run ends after the commit in hand."""

    def ring(*_: Any) -> None:
        if not callable(signal.getsignal(signal.SIGINT)):  # ignored, as in the background of a shell
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
