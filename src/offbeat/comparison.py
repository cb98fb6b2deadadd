"""Comparisons: several experiments, several seeds, one table and one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.assemble import build
from offbeat.config import Experiment
from offbeat.errors import BadNumbers, ConfigError
from offbeat.experiment import run
from offbeat.runs import plots, report
from offbeat.runs.disk import storing
from offbeat.runs.folder import Folder, file_name, reopened
from offbeat.runs.loop import Outcome
from offbeat.runs.progress import Progress
from offbeat.runs.target import LIMITS, plain_name, target_key


@dataclass(frozen=True)
class Comparison:
    """Outcomes by label, one per seed."""

    outcomes: Mapping[str, Sequence[Outcome]]
    target: str | None  # as results call it

    def __str__(self) -> str:
        return report.markdown(report.COLUMNS, self.rows())

    def rows(self) -> list[list[str]]:
        return report.comparison_rows({k: [o.result for o in v] for k, v in self.outcomes.items()}, self.target)

    def broken(self) -> list[str]:
        """A sentence for each run that stopped on bad numbers."""
        ends = [(label, o.result) for label, outcomes in self.outcomes.items() for o in outcomes]
        return [f"{label}, seed {r['seed']} {r['ended']}" for label, r in ends if r["ended"].startswith("stopped")]

    def curves(self) -> dict[str, list[list[dict[str, Any]]]]:
        return {label: [o.metrics for o in outcomes] for label, outcomes in self.outcomes.items()}

    def write(self, out: str | Path, title: str) -> tuple[Path, Path]:
        """The picture and the table, into the directory of the comparison, or into a new or empty one."""
        with reopened(Path(out)) as folder:
            with storing(folder.path):
                picture = plots.comparison(self.curves(), folder.path / "comparison.png", title)
                table = report.write_table(folder.path / "comparison.md", title, report.COLUMNS, self.rows())
                folder.add([picture, table])
            return picture, table


def compare(
    experiments: Mapping[str, Experiment],
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    progress: Callable[[str, Experiment], Progress] | None = None,
    overwrite: bool = False,
) -> Comparison:
    """Run every experiment with every seed. All are checked before the first one starts. `out` is a new or empty
    directory, or, with `overwrite`, that of another comparison; each run gets a directory in it, named by its label."""
    jobs = [(label, replace(e, seed=seed)) for label, e in experiments.items() for seed in seeds]
    problems: dict[str, None] = {}
    for _, experiment in jobs:
        try:
            build(experiment)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(problems)
    if out is None:
        outcomes = run_all(jobs, None, progress)
    else:
        names = [run_name(label, experiment) for label, experiment in jobs]
        with Folder(out, "comparison", overwrite) as folder:
            with storing(folder.path):
                folder.add([], names)
            outcomes = run_all(jobs, folder.path, progress)
    return Comparison(outcomes, first_target(list(experiments.values())))


def first_target(experiments: Sequence[Experiment]) -> str | None:
    """The target whose time a table shows: a limit on a metric before others."""
    spent = set(LIMITS) - {"accuracy", "accuracy_smoothed"}
    aims = [(plain_name(name), value) for e in experiments for name, value in e.until.items() if name not in spent]
    for e in experiments:
        given = e.targets if isinstance(e.targets, Mapping) else {"accuracy": e.targets}
        aims += [(name, value) for name, values in given.items() for value in values]
    return target_key(aims[0][0], aims[0][1]) if aims else None


def run_all(
    jobs: Sequence[tuple[str, Experiment]], out: Path | None, progress: Callable[[str, Experiment], Progress] | None
) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {label: [] for label, _ in jobs}
    for label, experiment in jobs:
        where = None if out is None else out / run_name(label, experiment)
        shown = progress(label, experiment) if progress else None
        try:
            outcomes[label].append(run(experiment, where, shown))
        except BadNumbers as error:  # one method that diverges does not end the comparison
            outcomes[label].append(error.outcome)
    return outcomes


def run_name(label: str, experiment: Experiment) -> str:
    return f"{file_name(label)}-seed{experiment.seed}"
