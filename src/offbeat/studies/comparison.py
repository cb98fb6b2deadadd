"""Comparisons: several experiments, several seeds, one table and one picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from offbeat.config import toml
from offbeat.errors import BadNumbers, ConfigError, OffbeatError, in_words
from offbeat.experiments.assemble import build
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import resume, run
from offbeat.runs import curves, plots, report
from offbeat.runs.disk import storing
from offbeat.runs.folder import Folder, file_name, reopened
from offbeat.runs.layout import page_table
from offbeat.runs.manifest import read_manifest
from offbeat.runs.outcome import Outcome
from offbeat.runs.progress import Progress
from offbeat.runs.stored import Stored, config_digest, read_metrics, read_model
from offbeat.runs.target import LIMITS, plain_name, target_key, target_of
from offbeat.studies import webpage

PAGE = "comparison.html"


@dataclass(frozen=True)
class Comparison:
    """Outcomes by label, one per seed."""

    outcomes: Mapping[str, Sequence[Outcome]]
    target: str | None  # as results call it

    def __str__(self) -> str:
        return report.markdown(*self.table()[:2])

    def table(self) -> report.Figures:
        results = {k: [o.reaching(self.target) for o in v] for k, v in self.outcomes.items()}
        return report.comparison_table(results, self.target)

    def __repr__(self) -> str:
        seeds = max(map(len, self.outcomes.values()), default=0)
        return f"Comparison({', '.join(self.outcomes)}; {seeds} seed{'s' if seeds != 1 else ''})"

    def _repr_html_(self) -> str:
        return page_table(*self.table()[:2])

    def frame(self) -> Any:
        """The evaluations of all runs, with `label` and `seed`: a pandas DataFrame, or, without pandas, Arrow."""
        rows = [
            {**row, "label": label, "seed": outcome.seed}
            for label, outcomes in self.outcomes.items()
            for outcome in outcomes
            for row in outcome.metrics
        ]
        table = pa.Table.from_pylist(rows)
        return table if find_spec("pandas") is None else table.to_pandas()

    def plot(self, metric: str | None = None, against: str = "time", target: float | None = None) -> Any:
        """A Matplotlib figure: of several seeds the mean and its 95 % band."""
        return curves.drawn(self.outcomes, metric, against, target)

    def broken(self) -> list[str]:
        """A sentence for each run that stopped on bad numbers."""
        ends = [(label, o.result) for label, outcomes in self.outcomes.items() for o in outcomes]
        return [f"{label}, seed {r['seed']} {r['ended']}" for label, r in ends if r["ended"].startswith("stopped")]

    def curves(self) -> dict[str, list[list[dict[str, Any]]]]:
        return {label: [o.metrics for o in outcomes] for label, outcomes in self.outcomes.items()}

    def write(self, out: str | Path, title: str) -> tuple[Path, Path]:
        """The picture and the table, into the directory of the comparison, or into a new or empty one; beside its
        runs also the page, comparison.html."""
        with reopened(Path(out)) as folder:
            with storing(folder.path):
                targets = accuracies(self.target)
                picture = plots.comparison(self.curves(), folder.path / "comparison.png", title, targets)
                table = report.write_table(folder.path / "comparison.md", title, *self.table()[:2])
                folder.add([picture, table])
                if folder.manifest.runs:
                    folder.add([webpage.report([folder.path], folder.path / PAGE, title, targets)])
            return picture, table


def compare(
    experiments: Mapping[str, Experiment],
    seeds: Sequence[int] | int = (0,),
    out: str | Path | None = None,
    progress: Callable[[str, Experiment], Progress] | None = None,
    overwrite: bool = False,
    resumed: bool = False,
    workers: int | None = None,
    address: str | None = None,
) -> Comparison:
    """Run every experiment with every seed; a number of seeds are those from 0 on. All are checked before the first one
    starts. `out` is a new or empty directory, or, with `overwrite`, that of another comparison; each run gets a
    directory in it, named by its label. With `resumed`, what the same comparison left there is kept, and gone on with
    where it broke off or where `until` is further now. With `workers`, so many runs go on side by side, each on one
    thread of a Ray cluster (`address`, or one that is started here)."""
    seeds = seed_list(seeds)
    jobs = [(label, replace(e, seed=seed)) for label, e in experiments.items() for seed in seeds]
    problems: dict[str, None] = {}
    for _, experiment in jobs:
        try:
            build(experiment)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(problems)
    run_them = partial(run_all, workers=workers, address=address)
    if out is None:
        outcomes = run_them(jobs, None, progress)
    else:
        names = [run_name(label, experiment) for label, experiment in jobs]
        with reopened(Path(out)) if resumed else Folder(out, "comparison", overwrite) as folder:
            with storing(folder.path):
                folder.add([], [name for name in names if name not in folder.manifest.runs])
            outcomes = run_them(jobs, folder.path, progress)
    return Comparison(outcomes, first_target(list(experiments.values())))


def seed_list(seeds: Sequence[int] | int) -> list[int]:
    """The seeds that are asked for, each once."""
    every = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not every:
        raise ConfigError(
            [f"seeds = {in_words(seeds)} is no seed at all; give some, such as (0, 1, 2), or a number of them"]
        )
    if twice := sorted({seed for seed in every if every.count(seed) > 1}):
        said = f"seeds = {in_words(seeds)} has {', '.join(map(str, twice))} more than once"
        raise ConfigError([f"{said}; the same run again tells nothing new, so name each seed once"])
    return every


def first_target(experiments: Sequence[Experiment]) -> str | None:
    """The target whose time a table shows: a limit on a metric before others."""
    spent = set(LIMITS) - {"accuracy", "accuracy_smoothed"}
    aims = [(name, value) for e in experiments for name, value in e.until.items() if name not in spent]
    for e in experiments:
        given = e.targets if isinstance(e.targets, Mapping) else {"accuracy": e.targets}
        aims += [(name, value) for name, values in given.items() for value in values]
    return target_key(aims[0][0], float(aims[0][1])) if aims else None


def accuracies(target: str | None) -> tuple[float, ...]:
    """A target as pictures take it: an accuracy, or none."""
    name, value = ("", 0.0) if target is None else target_of(target)
    return (value,) if plain_name(name) == "accuracy" else ()


def run_all(
    jobs: Sequence[tuple[str, Experiment]],
    out: Path | None,
    progress: Callable[[str, Experiment], Progress] | None,
    workers: int | None = None,
    address: str | None = None,
) -> dict[str, list[Outcome]]:
    places = [None if out is None else out / run_name(label, experiment) for label, experiment in jobs]
    if workers is None:
        each = [
            run_one(experiment, where, progress(label, experiment) if progress else None)
            for (label, experiment), where in zip(jobs, places, strict=True)
        ]
    else:
        from offbeat.studies.spread import Call, spread

        calls = [
            Call(run_name(label, experiment), run_one, (experiment, where))
            for (label, experiment), where in zip(jobs, places, strict=True)
        ]
        ended = dict(spread(calls, workers, address, jobs[0][1].device, "comparison"))
        each = [ended[place] for place in range(len(jobs))]
    outcomes: dict[str, list[Outcome]] = {label: [] for label, _ in jobs}
    for (label, _), outcome in zip(jobs, each, strict=True):
        outcomes[label].append(outcome)
    return outcomes


def run_one(experiment: Experiment, where: Path | None, progress: Progress | None = None) -> Outcome:
    """One run. If its directory has it already, it is read from there; it goes on where it was interrupted, or ended
    by other limits than are asked for."""
    try:
        if where is None or read_manifest(where) is None:
            return run(experiment, where, progress)
        stored = Stored(where)
        if stored.manifest.config_digest != config_digest(experiment.table()):
            raise OffbeatError(
                f"{where} holds a run with another config; give --overwrite to begin the comparison anew, or another "
                "--out"
            )
        if not stored.manifest.checkpoints:
            return run(experiment, where, progress, overwrite=True)
        limits = toml.parse(stored.manifest.config)["until"]
        if stored.manifest.finished and limits == experiment.until:
            outcome = stored_outcome(where)
            if outcome.ended != "interrupted":
                return outcome
        own = {kind: part for kind in ("method", "task", "fleet") if custom(part := getattr(experiment, kind))}
        return resume(where, experiment.until, progress, **own)
    except BadNumbers as error:  # one method that diverges does not end the comparison
        broken: Outcome = error.outcome
        return broken


def custom(part: Any) -> bool:
    """Whether a part of an experiment is an object of one's own, which a run directory has by name only."""
    return not isinstance(part, str | Mapping)


def stored_outcome(path: Path) -> Outcome:
    """What a run that has ended came to."""
    stored = Stored(path)
    stored.check("result.json")
    result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    return Outcome(result, read_metrics(path), read_model(path))


def run_name(label: str, experiment: Experiment) -> str:
    return f"{file_name(label)}-seed{experiment.seed}"
