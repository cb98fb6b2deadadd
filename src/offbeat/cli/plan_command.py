"""`offbeat plan`: what more devices would bring."""

from __future__ import annotations

from typing import Annotated

import typer

from offbeat.cli.flags import ConfigFile, Device, FleetName, Json, Sets, TaskName, experiment_of
from offbeat.cli.output import show_json, terminal


def plan(
    config: ConfigFile = None,
    gpus: Annotated[int, typer.Option("--gpus", "--workers", help="The most devices like this one.", min=1)] = 8,
    gbit: Annotated[float, typer.Option(help="The link of the driver, in Gbit/s.", min=0.001)] = 100.0,
    jobs: Annotated[
        int | None, typer.Option(help="Jobs in a wave. [default: those of a commit, or one of each client]", min=1)
    ] = None,
    method: Annotated[str | None, typer.Option(help="A method: `offbeat list methods`, or module:function.")] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    device: Device = None,
    sets: Sets = None,
    seconds: Annotated[float, typer.Option(help="How long each size of tile is measured.", min=0.1)] = 2.0,
    as_json: Json = False,
) -> None:
    """What 1, 2, 4, ... devices like this one would take for a wave of this experiment: measured rates of this device,
    the rule of tiles, what travels, and the time of a message.

    Example: offbeat plan --method local-sgd --task digits --gpus 8 --jobs 1000
    """
    flags = {"method": method, "task": task, "fleet": fleet, "device": device}
    experiment = experiment_of(config, flags, sets)
    from rich.console import Console

    from offbeat.runs import report
    from offbeat.studies.plan import plan

    with Console(stderr=True).status("plan") as status:
        answer = plan(experiment, gpus, gbit, jobs, seconds, lambda text: status.update(f"plan: {text}"))
    if as_json:
        show_json(answer)
        return
    facts = ", ".join(f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}"
                      for name, value in answer.items() if name not in ("table", "rates"))  # fmt: skip
    report.show_records(facts, answer["table"], terminal())
