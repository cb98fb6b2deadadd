"""Curves of runs: any metric against time, commits, samples or bytes; of several seeds the mean and its 95 % band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from matplotlib.figure import Figure

from offbeat.errors import ConfigError, unknown
from offbeat.runs import bands
from offbeat.runs.palette import AXES, GREY, axis_label, style, unit_of
from offbeat.runs.report import SHORT

AGAINST = {  # what a command calls an axis, and what the palette does
    "time": "virtual_seconds", "commits": "commits", "samples": "samples", "bytes": "bytes", "d2d": "bytes_d2d",
}  # fmt: skip
SUFFIXES = (".png", ".svg", ".pdf")

Rows = Sequence[Mapping[str, Any]]


def crossed(runs: Sequence[Rows], metric: str, against: str, target: float, more: bool) -> list[float | None]:
    """Where each run first met a target; None where it did not."""
    times: list[float | None] = []
    for rows in runs:
        pairs = zip(*bands.points(rows, AXES[AGAINST[against]][0], metric), strict=True)
        times.append(next((x for x, y in pairs if (y >= target if more else y <= target)), None))
    return times


def known_metrics(curves: Mapping[str, Sequence[Rows]]) -> list[str]:
    spent = {"commit", "virtual_seconds", "client_steps", "samples", "bytes_up", "bytes_down", "bytes_d2d"}
    names = {name for runs in curves.values() for rows in runs for row in rows[:1] for name in row}
    return sorted(names - spent)


def picture(
    curves: Mapping[str, Sequence[Rows]], metric: str | None = None, against: str = "time", target: float | None = None,
    more: bool | None = None, data: str | None = None, title: str = "",
) -> Figure:  # fmt: skip
    """One panel. `metric` None is the accuracy where all have one, else the loss."""
    if against not in AGAINST:
        raise ConfigError([f"against: {unknown('axis', against, AGAINST)}"])
    metric = metric or main_metric(curves)
    if metric not in (known := known_metrics(curves)):
        raise ConfigError([f"metric: {unknown('metric', metric, known)}"])
    more = metric not in ("loss", "training_loss") if more is None else more
    key = AXES[AGAINST[against]][0]
    lines = {label: bands.band(runs, key, metric) for label, runs in curves.items()}
    unit = unit_of(AGAINST[against], max((x for line in lines.values() for x in line.x), default=0.0))
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    for number, (label, runs) in enumerate(curves.items()):
        line, (colour, dash) = lines[label], style(number)
        xs = [x / unit.size for x in line.x]
        name = label if len(runs) == 1 else f"{label}, {len(runs)} seeds"
        if target is not None:
            there = [value for value in crossed(runs, metric, against, target, more) if value is not None]
            many = "" if len(there) == len(runs) else f" ({len(there)} of {len(runs)} seeds)"
            name += f": {mean(there) / unit.size:,.3g} {unit.name}{many}".rstrip() if there else ": not reached"
        axis.plot(xs, line.mean, color=colour, ls=(0, dash) if dash else "-", lw=1.8, label=name)
        if line.low is not None and line.high is not None:
            axis.fill_between(xs, line.low, line.high, color=colour, alpha=0.18, lw=0)
    if target is not None:
        axis.axhline(target, color=GREY, lw=1.0, ls=":")
    axis.set_xlabel(axis_label(AGAINST[against], unit))
    axis.set_ylabel(f"{metric} ({SHORT.get(data, data)})" if data else metric)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, title=None if target is None else f"to {target:g}")
    return figure


class Finished(Protocol):
    """What is drawn of an outcome."""

    @property
    def result(self) -> dict[str, Any]: ...
    @property
    def metrics(self) -> list[dict[str, Any]]: ...


def drawn(outcomes: Mapping[str, Sequence[Finished]], metric: str | None, against: str, target: float | None) -> Figure:
    """The picture of outcomes by label, one for each seed."""
    lines = {label: [each.metrics for each in group] for label, group in outcomes.items()}
    first = next(iter(outcomes.values()))[0].result
    said = first.get("metrics", {}).get(metric or main_metric(lines), {})
    title = f"{first['task']}, {first['fleet']} fleet"
    return picture(lines, metric, against, target, said.get("more_is_better"), said.get("data"), title)


def main_metric(curves: Mapping[str, Sequence[Rows]]) -> str:
    """The accuracy where all have one, else the loss."""
    every = [row for runs in curves.values() for rows in runs for row in rows]
    return "accuracy" if every and all(row["accuracy"] is not None for row in every) else "loss"


def save(figure: Figure, path: Path) -> Path:
    """As PNG, SVG or PDF, by the name's ending; the same bytes for the same picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError([f"--out {path}; give a name that ends in {', '.join(SUFFIXES)}"])
    path.parent.mkdir(parents=True, exist_ok=True)
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "offbeat"}):
        figure.savefig(path, dpi=130, metadata=dates[path.suffix.lower()])
    return path
