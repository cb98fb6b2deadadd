"""`offbeat tune`: the best rates and sizes of several methods, with the same budget each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.compare_command import labelled
from offbeat.cli.flags import Address, Device, FleetName, Json, Metrics, Sets, TaskName, Until, merge
from offbeat.cli.output import show_json, show_table, sign_of_life
from offbeat.config import toml


def tune(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods to tune, or tables [methods.X] of --config.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; [methods.LABEL] tables give what is not tuned.")
    ] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    device: Device = None,
    until: Until = None,
    metrics: Metrics = None,
    sets: Sets = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="What is tuned: client_lr=0.01..1 (a range, by powers) or buffer_size=5,10,20 (a choice); repeatable. "
            "Left out: the client rate, or the server rate where there is no other."
        ),
    ] = None,
    by: Annotated[str | None, typer.Option(help="Any metric; left out: the accuracy, or the loss.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Judge by the virtual time to this value instead of by the last value.")
    ] = None,
    trials: Annotated[int, typer.Option(help="For each method.", min=1)] = 16,
    seeds: Annotated[
        int,
        typer.Option(help="Seeds for trials that are not cut off; the best get fresh ones.", min=1),
    ] = 3,
    hold_out: Annotated[float, typer.Option(help="The share of every client's samples that judges.")] = 0.2,
    alone: Annotated[bool, typer.Option("--alone", help="One trial after the other, without sharing waves.")] = False,
    out: Annotated[Path, typer.Option(help="Directory for the ledger and tuned.toml; new or empty.")] = Path(
        "runs/tune"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the tuning in --out.")] = False,
    workers: Annotated[int | None, typer.Option(help="Trials side by side, each on one thread, by Ray.", min=1)] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Tune several methods with the same budget each, on a part of every shard that no final figure uses.

    Example: offbeat tune fedbuff local-sgd --until virtual_seconds=5 --target 0.85, then offbeat compare --tuned
    runs/tune.
    """
    sign_of_life("tune")
    flags = {"task": task, "fleet": fleet, "device": device}
    table = merge(toml.read(config) if config else {}, flags, sets or [], until or [], metrics or [])
    common, experiments = labelled(table, methods or [])
    from offbeat.runs.report import spoken
    from offbeat.studies.proposals import parse_search
    from offbeat.studies.tuning import tune as look_for

    def tell(label: str, done: int, many: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{label}: trial {done + 1} of {many}\r")
            sys.stderr.flush()

    outcome = look_for(
        experiments, parse_search(search or []), by, target, trials, range(common.seed, common.seed + seeds), hold_out,
        out, resume, not alone, None if workers else tell, workers, address,
    )  # fmt: skip
    tuned = out / "tuned.toml"
    if as_json:
        told = {"tuned": str(tuned), "best": outcome.best, "scores": outcome.scores, "trials": len(outcome.entries)}
        show_json({**told, "seconds": outcome.seconds})
        return
    rows = []
    for label, best in outcome.best.items():
        mine, score = outcome.trials(label), outcome.scores[label]
        chosen = ", ".join(f"{name} = {spoken(value)}" for name, value in best.items())
        value = spoken(score if target is None and outcome.aim.more else -score)
        value = value if outcome.aim.reached(score) else "not reached"
        lost = sum(entry.score is None for entry in mine)
        rows.append([label, chosen, value, str(len(mine)), str(sum(e.cut for e in mine)), str(lost)])
    judged = outcome.aim.metric if target is None else f"s to {outcome.aim.metric} {target}"
    columns = ["method", "best", f"{judged} (held-out)", "trials", "cut off", "failed"]
    show_table(f"{len(outcome.entries)} trials in {outcome.seconds:.1f} s", columns, rows, [0, 1, 2, 3, 4, 5])
    print(f"tuned: {tuned}; `offbeat compare --tuned {out}` runs them on the test set")
