"""`offbeat choose`: which method for this fleet, task and budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.flags import ConfigFile, Device, FleetName, Json, Seed, Sets, TaskName, experiment_of, limits
from offbeat.cli.output import show_json, show_table, writing
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.runs.progress import Progress

COLUMNS = ("", "method", "options", "time to target", "accuracy", "sent")


def choose(
    config: ConfigFile = None,
    task: TaskName = None,
    fleet: FleetName = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="What a run may spend, e.g. virtual_seconds=60 or bytes_up=1e8; repeatable."),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="The accuracy to reach soonest; else the best accuracy at the end wins.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only these methods; repeatable.")] = None,
    trials: Annotated[int, typer.Option(help="Trials of each method that is worth it.", min=1)] = 12,
    seeds: Annotated[int, typer.Option(help="Seeds of the final runs.", min=1)] = 3,
    seed: Seed = None,
    device: Device = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="A TOML file for the recommended run.")] = None,
    as_json: Json = False,
) -> None:
    """Choose a method: measure, drop what cannot work, tune the rest briefly, run the best over seeds, recommend one.

    Example: offbeat choose --fleet phones.toml --task digits --budget virtual_seconds=60 --target 0.85
    """
    experiment = experiment_of(
        config, {"task": task, "fleet": fleet, "seed": seed, "device": device}, sets, whole=False
    )
    if budget:
        experiment = replace(experiment, until=limits(budget))
    elif config is None:
        raise ConfigError(["give a budget, e.g. --budget virtual_seconds=60"])
    from offbeat.runs.progress import Progress
    from offbeat.studies import choosing

    def progress(label: str, until: Mapping[str, float]) -> Progress:
        return Progress(label, until)

    with writing(out, ".toml"):
        choice = choosing.choose(
            experiment, target, method or choosing.CANDIDATES, trials, seeds, None if as_json else progress
        )
        text = choice.experiment.toml()
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(f"# recommended by `offbeat choose`: {choice.reason}\n{text}", encoding="utf-8")
    if as_json:
        show_json(choice.json())
        return
    best = choice.best
    options = ", ".join(f"{key} = {value:g}" for key, value in best.options.items()) or "its defaults"
    print(f"{best.method} with {options}: {choice.reason}.\n")
    at = "" if target is None else "; accuracy and bytes at the target, or where it was not reached, at the end"
    show_table(f"{choice.seeds} seeds, 95 % intervals{at}", COLUMNS, choosing.rows(choice))
    for name, why in choice.dropped.items():
        print(f"dropped {name}: {why}")
    print(f"\nwhat it rests on: {choice.measured.verdict}")
    for note in best.notes:
        print(f"  {note}")
    tried = sum(candidate.trials for candidate in choice.ranked)
    print(f"  {tried} trials on held-out parts of the clients' shards; final figures on the task's own test set")
    if out is not None:
        print(f"\nrun it: offbeat run {out}")
    else:
        print(f"\n{text}")
