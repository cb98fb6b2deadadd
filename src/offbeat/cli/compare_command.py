"""`offbeat compare`: several methods, several seeds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli.flags import (
    Address,
    Device,
    FleetName,
    Json,
    Metrics,
    Overwrite,
    Sets,
    TaskName,
    Until,
    Watching,
    merge,
    watching,
)
from offbeat.cli.output import show_table, sign_of_life
from offbeat.config import toml
from offbeat.errors import BadNumbers, ConfigError

if TYPE_CHECKING:
    from offbeat.experiments.experiment import Experiment


def compare(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods to compare, or tables [methods.X] of --config.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; [methods.LABEL] tables give each method's options.")
    ] = None,
    tuned: Annotated[Path | None, typer.Option(help="What `offbeat tune` left: its directory, or tuned.toml.")] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, from the config's seed on.", min=1)] = 1,
    device: Device = None,
    until: Until = None,
    metrics: Metrics = None,
    callbacks: Watching = None,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Directory for the runs, the table, the picture and the page.")] = Path(
        "runs/compare"
    ),
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the comparison in --out: runs that reached their end are kept.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Runs side by side, each on one thread, by Ray.", min=1)] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Run several methods on the same task and fleet: a table, a picture and a page, at equal time and commits.

    Example: offbeat compare fedbuff local-sgd --until virtual_seconds=2 --seeds 3 --out runs/compare
    """
    sign_of_life("compare")
    if tuned is not None:
        if config is not None:
            raise ConfigError(["--tuned is a config of its own; leave out --config"])
        config = tuned / "tuned.toml" if tuned.is_dir() else tuned
    flags = {"task": task, "fleet": fleet, "device": device}
    table = merge(toml.read(config) if config else {}, flags, sets or [], until or [], metrics or [])
    watching(table, callbacks)
    common, experiments = labelled(table, methods or [])
    from offbeat.runs.progress import Progress
    from offbeat.runs.store import strict
    from offbeat.studies.comparison import PAGE, compare

    def progress(label: str, experiment: Experiment) -> Progress:
        return Progress(f"{label} seed {experiment.seed}", experiment.until)

    all_seeds = range(common.seed, common.seed + seeds)
    result = compare(experiments, all_seeds, out, progress, overwrite, resume, workers, address)
    title = f"{common.table()['task']['name']}, {common.table()['fleet']['name']} fleet, {seeds} seed(s)"
    picture, written = result.write(out, title)
    if as_json:
        runs = {label: [strict(o.result) for o in outcomes] for label, outcomes in result.outcomes.items()}
        print(json.dumps({"picture": str(picture), "table": str(written), "page": str(out / PAGE), "runs": runs}))
    else:
        show_table(title, *result.table())
        print(f"picture: {picture}\ntable:   {written}\npage:    {out / PAGE}")
    if result.broken():
        raise BadNumbers("\n".join(result.broken()))


def labelled(table: dict[str, Any], methods: list[str]) -> tuple[Experiment, dict[str, Experiment]]:
    """What all experiments of a comparison have in common, and each of them by its label."""
    from offbeat.experiments.experiment import Experiment

    options = table.pop("methods", {})
    if not isinstance(options, dict) or not all(isinstance(each, dict) for each in options.values()):
        raise ConfigError(["[methods] must hold one table per label, e.g. [methods.fedbuff]"])
    if "method" in table:
        raise ConfigError(["compare runs several methods; set options as methods.LABEL.option, not method.option"])
    labels = methods or list(options)
    if not labels:
        raise ConfigError(["nothing to compare; name methods, e.g. `offbeat compare fedbuff local-sgd`"])
    common = Experiment.of(table)
    return common, {label: replace(common, method={"name": label, **options.get(label, {})}) for label in labels}
