"""`offbeat clusters`: the clusters of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli.flags import ConfigFile, FleetName, Json, Sets, merge
from offbeat.cli.output import show_json, show_table, writing
from offbeat.config import toml
from offbeat.errors import ConfigError
from offbeat.theory import hlsgd

if TYPE_CHECKING:
    from offbeat.fleets.clusters import Clusters
    from offbeat.fleets.fleet import Fleet

COLUMNS = ("cluster", "devices", "links", "most of one", "rho", "1 - rho", "tau from", "s per step")


def clusters(
    config: ConfigFile = None,
    fleet: FleetName = None,
    clients: Annotated[int | None, typer.Option(help="Devices, where no task says; else 32.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Decides random graphs and links.")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="A picture of the clusters: a PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Show a fleet's clusters: sizes, links, spectral gaps, and what the theory of HL-SGD asks of them.

    Example: offbeat clusters --fleet hlsgd --set 'fleet.clusters={count=4,graph="torus"}' --out clusters.png
    """
    table = toml.read(config) if config else {"fleet": "hlsgd"}
    from offbeat.experiments.assemble import make_fleet, make_task, seed_problems
    from offbeat.experiments.experiment import Experiment

    experiment = Experiment.of(merge(table, {"fleet": fleet, "seed": seed}, sets or [], []))
    if problems := seed_problems(experiment.seed):
        raise ConfigError(problems)
    with writing(out, ".png"):
        devices = experiment.task.get("clients") if isinstance(experiment.task, dict) else None
        if devices is None and config is not None and clients is None:
            task = make_task(experiment)
            devices = task.clients + len(task.left_out)
        whole = make_fleet(experiment, devices if devices is not None else clients or 32)
        parts = whole.clusters
        if parts is None:
            raise ConfigError([f"fleet '{whole.name}' has no clusters; give it some: --set fleet.clusters=4"])
        records = cluster_records(whole, parts)
        if out is not None:
            from offbeat.runs import fleet_plots

            fleet_plots.clusters(whole, out)
    if as_json:
        show_json({"rho_max": parts.rho_max, "clusters": records})
        return
    show_table(f"{whole.name}: {len(records)} clusters, rho_max {parts.rho_max:.4f}", COLUMNS, cluster_rows(records))
    print("tau from: the fewest local steps with which device sampling is covered, (7) of the HL-SGD paper")
    if out is not None:
        print(f"wrote {out}")


def cluster_records(fleet: Fleet, parts: Clusters) -> list[dict[str, Any]]:
    return [
        {"cluster": number, "devices": one.size, "links": sum(graph.number_of_edges() for graph in one.graphs),
         "most_links": max(degree for graph in one.graphs for _, degree in graph.degree), "rho": one.rho,
         "gap": 1 - one.rho, "least_tau": hlsgd.least_tau(one.rho),
         "step_seconds": [float(fleet.step_seconds[list(one.members)].min()),
                          float(fleet.step_seconds[list(one.members)].max())]}
        for number, one in enumerate(parts.each)
    ]  # fmt: skip


def cluster_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [str(r["cluster"]), str(r["devices"]), str(r["links"]), str(r["most_links"]), f"{r['rho']:.4f}",
         f"{r['gap']:.4f}", f"{r['least_tau']:g}", "{:.3g} to {:.3g}".format(*r["step_seconds"])]
        for r in records
    ]  # fmt: skip
