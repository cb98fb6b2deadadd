"""Flags that several commands take, and the config that they and a file make together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.config import toml
from offbeat.errors import ConfigError
from offbeat.runs.target import LIMITS

if TYPE_CHECKING:
    from offbeat.experiments.experiment import Experiment

ConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file; flags and --set change what it says.")]
TaskName = Annotated[str | None, typer.Option(help="A task: `offbeat list tasks`, or module:function.")]
FleetName = Annotated[
    str | None,
    typer.Option(help="A fleet: `offbeat list fleets`, module:function, or a TOML file with a table [fleet]."),
]
Seed = Annotated[int | None, typer.Option(help="Decides every random draw.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the config, e.g. method.client_lr=0.1; repeatable.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
EngineName = Annotated[
    str | None, typer.Option("--engine", help="local (whole waves), tiles (waves in tiles), or ray (tiles on workers).")
]
Workers = Annotated[
    int | None, typer.Option(help="Workers of the engine ray. [default: one for each GPU, or core]", min=1)
]
Address = Annotated[
    str | None, typer.Option(help="Of a Ray cluster: auto, or HOST:PORT. [default: one is started here]")
]
Until = Annotated[
    list[str] | None,
    typer.Option(
        help=f"When to stop, e.g. accuracy=0.9; repeatable. Limits: {', '.join(LIMITS)}, and any further metric, also "
        "as METRIC_smoothed. They replace the config's."
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", help="A further metric: `offbeat list metrics`, or module:function; repeatable."),
]
Watching = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        help="What watches the run and may end it: `offbeat list callbacks`, module:function, or a table such as "
        "'{name = \"early-stopping\", patience = 5}'; repeatable.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what an earlier run of this command left in --out.")
]
ChangedCode = Annotated[
    bool, typer.Option("--changed-code", help="Go on although code of your own that the run uses was changed.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def experiment_of(
    config: Path | None, flags: dict[str, Any], sets: list[str] | None, until: list[str] | None = None,
    metrics: list[str] | None = None, callbacks: list[str] | None = None, whole: bool = True,
) -> Experiment:  # fmt: skip
    """The experiment that a file, if any, and the flags describe; not `whole` where others put in the method."""
    table = toml.read(config) if config else {}
    watching(table, callbacks)
    from offbeat.experiments.assemble import read_experiment
    from offbeat.experiments.experiment import Experiment

    read = read_experiment if whole else Experiment.of
    return read(merge(table, flags, sets or [], until or [], metrics or []))


def engine_of(engine: str | None, workers: int | None, address: str | None) -> dict[str, Any]:
    """Who computes, as far as flags say it; workers and addresses are Ray's."""
    given = {"engine": engine, "workers": workers, "address": address}
    if engine is None and (workers is not None or address is not None):
        given["engine"] = "ray"
    return {name: value for name, value in given.items() if value is not None}


def merge(
    table: dict[str, Any], flags: dict[str, Any], sets: list[str], until: list[str], metrics: Sequence[str] = ()
) -> dict[str, Any]:
    """A config's table with the flags and then each --set laid over it."""
    for name, given in flags.items():
        if given is None:
            continue
        if name == "fleet" and given.endswith(".toml"):
            table[name] = fleet_table(Path(given))
            continue
        named = name in ("method", "task", "fleet") and isinstance(table.get(name), dict)
        table[name] = table[name] | {"name": given} if named else given
    if until:
        table["until"] = limits(until)
    for text in sets:
        path, value = assignment("--set", text)
        place = table
        *parents, last = path.split(".")
        for depth, parent in enumerate(parents):
            inner = place.get(parent, {})
            if depth == 0 and parent in ("method", "task", "fleet") and parent not in place:
                inner = default(parent)
            place[parent] = dict(inner) if isinstance(inner, dict) else {"name": inner}
            place = place[parent]
        place[last] = value
    looks = table.get("evaluate", {} if metrics else None)
    if isinstance(looks, dict) and (looks or metrics):
        asked = looks.get("metrics") or []
        looks |= {"metrics": [*asked, *metrics]} if metrics and isinstance(asked, list) else {}
        table["evaluate"] = looks if {"every_commits", "every_seconds"} & looks.keys() else default("evaluate") | looks
    return table


def watching(table: dict[str, Any], callbacks: list[str] | None) -> None:
    """Add callbacks of the command line to those of the config."""
    if callbacks:
        table["callbacks"] = [*table.get("callbacks", []), *(toml.parse_value(text) for text in callbacks)]


def fleet_table(path: Path) -> Any:
    """The table [fleet] of a file, such as `offbeat fleet from-csv` writes."""
    table = toml.read(path)
    if "fleet" not in table:
        raise ConfigError([f"{path} has no table [fleet]; `offbeat fleet from-csv` writes one"])
    return table["fleet"]


def default(kind: str) -> Any:
    from offbeat.experiments.experiment import Experiment

    return getattr(Experiment(), kind)


def limits(until: list[str] | None) -> dict[str, Any]:
    return dict(assignment("--until", text) for text in until or [])


def assignment(flag: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigError([f"{flag} {text}: write it as key=value, e.g. {flag} commits=100"])
    return name.strip(), toml.parse_value(value.strip())
