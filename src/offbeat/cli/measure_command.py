"""`offbeat measure`: the constants of a problem, and what theory makes of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli.flags import ConfigFile, Device, FleetName, Json, Seed, Sets, TaskName, assignment, experiment_of
from offbeat.cli.output import show_json, show_table, writing
from offbeat.errors import ConfigError
from offbeat.theory.theorems import ADVISED


def measure(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="The method whose schedule is looked at.")] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Measure at this model: a run directory or a file.")] = None,
    train: Annotated[int, typer.Option(help="Or train so many commits first.", min=0)] = 0,
    samples: Annotated[int, typer.Option(help="Samples of each client to look at; 0: all.", min=0)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds of FedAvg for the path estimators.", min=1)] = 10,
    local_steps: Annotated[int, typer.Option(help="Local steps in each of them.", min=1)] = 10,
    client_lr: Annotated[float, typer.Option(help="Their rate.")] = 0.05,
    iterations: Annotated[int, typer.Option(help="Steps of power iteration beside the path; 0: none.", min=0)] = 0,
    advise: Annotated[str | None, typer.Option(help=f"What theory admits for: {', '.join(ADVISED)}.")] = None,
    known: Annotated[
        list[str] | None,
        typer.Option("--known", help="A constant that you know, e.g. convexity=0.1 or quadratic=true; repeatable."),
    ] = None,
    theorem: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask this one of --advise METHOD: a name of `offbeat list theorems`, or module:function; repeatable."
        ),
    ] = None,
    seed: Seed = None,
    device: Device = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for all of it.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a problem: curvature (L~, L_g, L_h), divergence (zeta, gamma, B), noise, clusters, staleness.

    Example: offbeat measure --task digits --train 50 --advise local-sgd
    """
    flags = {"method": method, "task": task, "fleet": fleet, "seed": seed, "device": device}
    experiment = experiment_of(config, flags, sets)
    from offbeat.experiments.experiment import split_name
    from offbeat.runs import report
    from offbeat.runs.progress import Progress
    from offbeat.runs.store import strict
    from offbeat.theory import advise as theory
    from offbeat.theory.measure import Effort, measure

    facts = dict(assignment("--known", text) for text in known or [])
    theory.check_known(facts)
    theorems = tuple(theorem or ())
    if theorems and advise is None:
        raise ConfigError(["--theorem says which theorems to ask; say with --advise METHOD about what"])
    if advise is not None:
        theory.asked_about(experiment, advise, theorems)  # what cannot be asked is said before anything is measured
    effort = Effort(samples or None, 8 if samples else None, rounds, local_steps, client_lr, iterations)
    with writing(out, ".json"):
        progress = Progress("measuring", {})
        try:
            measured = measure(experiment, checkpoint, train, effort, progress)
        finally:
            progress.close()
        measured = theory.with_known(measured, facts)
        plan, opening = None, ""
        counsels: dict[str, theory.Counsel] = {}
        if advise is not None:  # every figure beside the advice belongs to the method that it is about
            measured = replace(measured, schedule=theory.schedule_for(measured, experiment, advise, theorems))
            plan, counsels = theory.advise(measured, experiment, advise, theorems)
            opening = theory.opening(experiment, advise, plan, counsels)
        figures = measured.json()
        if plan is not None:
            figures |= {
                "method": advise,
                "opening": opening,
                "plan": asdict(plan),
                "advice": {name: counsel.json() for name, counsel in counsels.items()},
            }
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(strict(figures), indent=1) + "\n")
    if as_json:
        show_json(figures)
        return
    if opening:
        print(f"{opening}.\n")
    name = split_name("task", experiment.task)[0]
    show_table(f"{name}: loss {measured.loss:.4g}", report.READINGS, report.reading_rows(measured))
    method = advise or method_name(experiment.method)
    lines = [measured.verdict, *report.schedule_lines(measured.schedule, method), *measured.notes]
    lines.append(f"{measured.passes:.1f} passes over the data in {measured.seconds:.1f} s")
    for name, counsel in counsels.items():
        lines += report.counsel_lines(name, counsel)
    print("\n".join(lines))


def method_name(method: Any) -> str:
    return method if isinstance(method, str) else str(method["name"] if isinstance(method, dict) else method.name)
