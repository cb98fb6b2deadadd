"""`offbeat fleet`: fleets that you bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli.flags import Json
from offbeat.cli.output import show_json, show_table, writing
from offbeat.config import toml
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.fleets.fleet import Fleet

fleet_app = typer.Typer(help="Bring a fleet of your own.", no_args_is_help=True, rich_markup_mode=None)


@fleet_app.callback()
def fleet() -> None:
    """Bring a fleet of your own: from measurements to a TOML file that every --fleet takes."""


@fleet_app.command("from-csv")
def from_csv(
    table: Annotated[Path, typer.Argument(help="A CSV file with a header: step_ms, down_mbit, up_mbit, ...")],
    out: Annotated[Path | None, typer.Option(help="The TOML file; else beside the table, with its name.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A picture of speeds and links: a PNG file.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of the table's name, where no --out is given.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Local steps of a job, for the summary.", min=1)] = 10,
    megabytes: Annotated[float, typer.Option(help="Size of the model, for the summary.", min=0.0)] = 1.0,
    as_json: Json = False,
) -> None:
    """Turn measured devices into a fleet: one row for each, its columns named by quantity and unit (docs/fleets.md).

    Example: offbeat fleet from-csv phones.csv --picture phones.png && offbeat run --fleet phones.toml
    """
    target = out or table.with_suffix(".toml")
    if target == table:
        raise ConfigError([f"--out {target} would overwrite the table; name a TOML file"])
    if out is None and target.exists() and not overwrite:
        raise ConfigError([f"{target} is there already; give another name by --out, or --overwrite to replace it"])
    with writing(picture, ".png"), writing(target, ".toml"):
        from offbeat.fleets.make import build
        from offbeat.fleets.measured import read_table

        devices = read_table(table)
        built = build("measured", devices.devices, 0, **devices.options)
        target.parent.mkdir(parents=True, exist_ok=True)
        head = f"# {devices.devices} devices from {table.name}; use it with --fleet {target.name}\n"
        target.write_text(head + toml.write({"fleet": {"name": "measured", **devices.options}}), encoding="utf-8")
        if picture is not None:
            from offbeat.runs import fleet_plots

            fleet_plots.fleet(built, picture, f"{table.stem}: {devices.devices} devices")
    summary = summed(built, steps, megabytes * 1e6)
    if as_json:
        show_json({"fleet": str(target), "devices": devices.devices, "ignored": list(devices.ignored), **summary})
        return
    rows = [[name, *(f"{value:.4g}" for value in values.values())] for name, values in summary["quantities"].items()]
    show_table(f"{devices.devices} devices", ("", "least", "5 %", "median", "95 %", "most"), rows)
    print(summary["said"])
    if devices.ignored:
        print(f"columns left out: {', '.join(devices.ignored)}")
    print(f"fleet: {target}" + (f"\npicture: {picture}" if picture else ""))


def summed(fleet: Fleet, steps: int, size: float) -> dict[str, Any]:
    """Quantiles of what was measured, and what it means for rounds that wait for everyone."""
    import numpy as np

    from offbeat.fleets.clusters import MBIT
    from offbeat.runs.palette import duration

    columns = {"seconds per step": fleet.step_seconds, "down, Mbit/s": fleet.down_bandwidth / MBIT,
               "up, Mbit/s": fleet.up_bandwidth / MBIT, "latency, s": fleet.down_latency}  # fmt: skip
    names = ("least", "5 %", "median", "95 %", "most")
    quantities = {
        name: dict(zip(names, np.quantile(values, (0, 0.05, 0.5, 0.95, 1)).tolist(), strict=True))
        for name, values in columns.items()
        if np.isfinite(values).all() and values.max() > 0
    }
    computing = fleet.step_seconds * steps
    each = computing + fleet.down_latency + fleet.up_latency + size / fleet.down_bandwidth + size / fleet.up_bandwidth
    idle = float(1 - computing.mean() / each.max())  # `idle_share` of a run: transfers count as idle
    said = (
        f"a job of {steps} steps and {size / 1e6:g} MB each way takes {duration(float(np.median(each)))} on the median "
        f"device and {duration(float(each.max()))} on the slowest ({each.max() / np.median(each):.1f} times as long); "
        f"in rounds that wait for everyone, devices would be idle {idle:.0%} of the time (they send, receive or "
        "wait)"
    )
    return {"quantities": quantities, "idle_in_rounds": idle, "job_seconds_median": float(np.median(each)),
            "job_seconds_slowest": float(each.max()), "said": said}  # fmt: skip
