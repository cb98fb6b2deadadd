"""Curves of runs: any metric against time, commits, samples or bytes; of several seeds the mean and its 95 % band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from offbeat.errors import ConfigError, unknown
from offbeat.runs.report import SHORT

AGAINST = {  # what a command calls it: the column, its name on the axis, and how many of its unit make one there
    "time": ("virtual_seconds", "virtual seconds", 1.0),
    "commits": ("commit", "commits", 1.0),
    "samples": ("samples", "samples", 1.0),
    "bytes": ("bytes", "MB up and down", 1e6),
    "d2d": ("bytes_d2d", "MB between devices", 1e6),
}
SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (3, 1)), (0, (1, 1)))
POINTS = 200  # of a mean over seeds

Rows = Sequence[Mapping[str, Any]]


def place(row: Mapping[str, Any], against: str) -> float:
    column, _, unit = AGAINST[against]
    total = row["bytes_up"] + row["bytes_down"] if column == "bytes" else row[column]
    return float(total) / unit


def line(rows: Rows, metric: str, against: str) -> tuple[np.ndarray, np.ndarray]:
    """The points of a curve, without evaluations that have no such value."""
    seen = [(place(row, against), row[metric]) for row in rows if row.get(metric) is not None]
    xs, ys = zip(*seen, strict=True) if seen else ((), ())
    return np.array(xs, dtype=float), np.array(ys, dtype=float)


def band(runs: Sequence[Rows], metric: str, against: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The mean over seeds where all of them were, between evaluations in a straight line, and half of its 95 %
    interval; of one seed its own points."""
    lines = [found for rows in runs if len((found := line(rows, metric, against))[0])]
    if not lines:
        return np.zeros(0), np.zeros(0), None
    if len(lines) == 1:
        return *lines[0], None
    from scipy.stats import t

    xs = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), POINTS)
    ys = np.array([np.interp(xs, x, y) for x, y in lines])
    half = t.ppf(0.975, len(lines) - 1) * ys.std(axis=0, ddof=1) / np.sqrt(len(lines))
    return xs, ys.mean(axis=0), half


def crossed(runs: Sequence[Rows], metric: str, against: str, target: float, more: bool) -> list[float | None]:
    """Where each run first met a target; None where it did not."""
    found: list[float | None] = []
    for rows in runs:
        xs, ys = line(rows, metric, against)
        there = np.flatnonzero(ys >= target if more else ys <= target)
        found.append(float(xs[there[0]]) if len(there) else None)
    return found


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
        raise ConfigError([f"--against: {unknown('axis', against, AGAINST)}"])
    metric = metric or main_metric(curves)
    if metric not in (known := known_metrics(curves)):
        raise ConfigError([f"--metric: {unknown('metric', metric, known)}"])
    more = metric not in ("loss", "training_loss") if more is None else more
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    for number, (label, runs) in enumerate(curves.items()):
        xs, ys, half = band(runs, metric, against)
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        name = label if len(runs) == 1 else f"{label}, {len(runs)} seeds"
        if target is not None:
            there = [value for value in crossed(runs, metric, against, target, more) if value is not None]
            many = "" if len(there) == len(runs) else f" ({len(there)} of {len(runs)} seeds)"
            name += f": {np.mean(there):,.3g}{many}" if there else ": not reached"
        axis.plot(xs, ys, color=colour, ls=dash, lw=1.8, label=name)
        if half is not None:
            axis.fill_between(xs, ys - half, ys + half, color=colour, alpha=0.18, lw=0)
    if target is not None:
        axis.axhline(target, color="#888888", lw=1.0, ls=":")
    axis.set_xlabel(AGAINST[against][1])
    axis.set_ylabel(f"{metric} ({SHORT.get(data, data)})" if data else metric)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, title=None if target is None else f"{AGAINST[against][1]} to {target:g}")
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
