"""`offbeat run`, `resume` and `replay`: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.flags import (
    Address,
    ChangedCode,
    ConfigFile,
    Device,
    EngineName,
    FleetName,
    Json,
    Metrics,
    Overwrite,
    Seed,
    Sets,
    TaskName,
    Until,
    Watching,
    Workers,
    engine_of,
    experiment_of,
    limits,
)
from offbeat.cli.output import show_json, show_outcome, sign_of_life
from offbeat.errors import ReplayDiffers


def run(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="A method: `offbeat list methods`, or module:function.")] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    seed: Seed = None,
    device: Device = None,
    engine: EngineName = None,
    workers: Workers = None,
    address: Address = None,
    until: Until = None,
    metrics: Metrics = None,
    callbacks: Watching = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for config, trace, metrics, result and model; new or empty.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Run one experiment.

    Example: offbeat run --method fedbuff --set method.buffer_size=5 --until accuracy=0.9 --until commits=500
    """
    sign_of_life(method or "run")
    flags = {"method": method, "task": task, "fleet": fleet, "seed": seed, "device": device}
    flags |= engine_of(engine, workers, address)
    experiment = experiment_of(config, flags, sets, until, metrics, callbacks)
    from offbeat.experiments.running import run

    show_outcome(run(experiment, out, True, overwrite), as_json, out)


def resume(
    directory: Annotated[Path, typer.Argument(help="A run directory that `offbeat run --out` left.")],
    until: Until = None,
    engine: EngineName = None,
    workers: Workers = None,
    address: Address = None,
    changed_code: ChangedCode = False,
    as_json: Json = False,
) -> None:
    """Go on with a run that stopped; the result is the one the run would have had. Another engine may go on with it.

    Example: offbeat resume runs/hetero --until commits=30
    """
    further = limits(until)
    sign_of_life(str(directory))
    from offbeat.experiments.running import preparing, resume
    from offbeat.runs.progress import Progress

    others = engine_of(engine, workers, address)
    with preparing(Progress(str(directory), further)) as progress:
        outcome = resume(directory, further or None, progress, changed_code, **others)
    show_outcome(outcome, as_json, directory)


def replay(
    directory: Annotated[Path, typer.Argument(help="A finished run directory.")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far apart the models may be: the norm of the difference against that of the stored model. "
            "Left out: 0 where the run was made, elsewhere by its precision.",
            min=0.0,
        ),
    ] = None,
    engine: EngineName = None,
    workers: Workers = None,
    address: Address = None,
    changed_code: ChangedCode = False,
    as_json: Json = False,
) -> None:
    """Feed a stored trace to the policy again; fails unless it says the same and ends at the same model.

    Of a live run the commands must be the same; jobs and model are computed again where the shards are at hand.

    Example: offbeat replay runs/hetero
    """
    from offbeat.experiments.running import repeat
    from offbeat.runs.stored import Stored

    if Stored(directory).manifest.live:
        replay_live(directory, tolerance, as_json)
        return

    outcome, apart = repeat(directory, tolerance, changed_code, **engine_of(engine, workers, address))
    if as_json:
        show_json({"same_commands": True, **apart.json(), **outcome.result})
    else:
        model = "has the same bits" if apart.same_bits else f"{'is near' if apart.within else 'DIFFERS'}: {apart}"
        print(f"same commands over {outcome.commits} commits; model {model}")
    if not apart.within:
        raise ReplayDiffers(f"the model of the replay differs from the stored one: {apart}", outcome, apart)


def replay_live(directory: Path, tolerance: float | None, as_json: bool) -> None:
    from offbeat.cli.live_commands import require_extra

    require_extra()
    from offbeat.live.verify import verify

    verified = verify(directory, tolerance)
    if as_json:
        show_json(verified.json())
    else:
        print(verified)
    if not verified.within:
        raise ReplayDiffers(f"numbers of the live run differ from the simulator's: {verified}", None, verified.model)
