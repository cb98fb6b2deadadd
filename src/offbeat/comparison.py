"""Comparisons: several experiments, several seeds, one table and one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat import webpage
from offbeat.assemble import build
from offbeat.config import Experiment
from offbeat.errors import BadNumbers, ConfigError
from offbeat.experiment import run
from offbeat.runs import plots, report
from offbeat.runs.disk import storing
from offbeat.runs.folder import Folder, file_name, reopened
from offbeat.runs.loop import Outcome
from offbeat.runs.progress import Progress

PAGE = "comparison.html"


@dataclass(frozen=True)
class Comparison:
    """Outcomes by label, one per seed."""

    outcomes: Mapping[str, Sequence[Outcome]]
    target: float | None

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
        """The picture and the table, into the directory of the comparison, or into a new or empty one; beside its
        runs also the page, comparison.html."""
        with reopened(Path(out)) as folder:
            with storing(folder.path):
                targets = () if self.target is None else (self.target,)
                picture = plots.comparison(self.curves(), folder.path / "comparison.png", title, targets)
                table = report.write_table(folder.path / "comparison.md", title, report.COLUMNS, self.rows())
                folder.add([picture, table])
                if folder.manifest.runs:
                    folder.add([webpage.report([folder.path], folder.path / PAGE, title, targets)])
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
    targets = [e.until["accuracy"] for e in experiments.values() if "accuracy" in e.until]
    targets += [e.targets[0] for e in experiments.values() if e.targets]
    return Comparison(outcomes, targets[0] if targets else None)


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
