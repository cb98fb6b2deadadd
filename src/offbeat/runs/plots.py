"""Pictures of runs: curves with bands against time, commits, samples and bytes; points, heat maps, paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import patheffects
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from offbeat.runs import bands
from offbeat.runs.palette import AXES, COLOURS, GREY, axis_label, style, unit_of

PANELS = ("virtual_seconds", "commits", "samples", "bytes")
HALO = [patheffects.withStroke(linewidth=3, foreground="w")]  # text that stays readable over lines
HIGHER = ("accuracy", "top5", "f1", "auc")  # scores between 0 and 1 of which more is better

Curves = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]  # label -> one list of metrics rows per seed


def save(figure: Figure, path: Path) -> Path:
    """PNG, SVG or PDF, by the name; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}.get(path.suffix.lstrip(".").lower())
    with plt.rc_context({"svg.hashsalt": "offbeat"}):
        figure.savefig(path, dpi=130, bbox_inches="tight", metadata={stamp: None} if stamp else None)
    plt.close(figure)
    return path


def comparison(
    curves: Curves,
    path: Path,
    title: str = "",
    targets: Sequence[float] = (),
    score: str | None = None,
    against: Sequence[str] | None = None,
) -> Path:
    """The same curves against virtual time, commits, samples and bytes: a line for each label with its 95 % band over
    seeds, its name at its end, and the targets as lines across."""
    score = score or common_score(curves)
    names = list(against or PANELS)
    if against is None and any(bands.value(row, "bytes_d2d") for runs in curves.values() for row in runs[0][-1:]):
        names[2] = "bytes_d2d"  # samples go along with steps; bytes between devices are a cost of their own
    wide = min(2, len(names))
    tall = -(-len(names) // wide)
    figure, axes = plt.subplots(
        tall, wide, figsize=(6.4 * wide, 3.9 * tall), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=False):
        draw(axis, curves, name, score)
        draw_targets(axis, targets, score)
        axis.tick_params(labelleft=True)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(score.replace("_", " "))
    seeds = {len(runs) for runs in curves.values()}
    note = f"mean of {max(seeds)} seeds, 95 % interval" if max(seeds, default=1) > 1 else ""
    figure.suptitle(" \u2014 ".join(filter(None, [title, note])))
    figure.canvas.draw()  # where lines end is known once the layout is
    for axis in axes.flat[: len(names)]:
        label_ends(axis)
    return save(figure, path)


def common_score(curves: Curves) -> str:
    """Accuracy where every run has it, else the loss."""
    rows = [row for runs in curves.values() for rows in runs for row in rows[-1:]]
    return "accuracy" if rows and all(row.get("accuracy") is not None for row in rows) else "loss"


def panels(groups: Mapping[str, Curves], path: Path, title: str = "", against: Sequence[str] = ("commits",)) -> Path:
    """Accuracy: a column of panels for each group of curves, a row for each thing that they are drawn against."""
    size = (3.8 * len(groups), 3.4 * len(against))
    figure, axes = plt.subplots(len(against), len(groups), figsize=size, squeeze=False, layout="constrained")
    for column, (group, curves) in zip(axes.T, groups.items(), strict=True):
        for axis, name in zip(column, against, strict=True):
            draw(axis, curves, name, "accuracy")
        column[0].set_title(group, fontsize=10)
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy")
    axes[0, 0].legend(frameon=False, fontsize=8, handlelength=3)
    figure.suptitle(title)
    return save(figure, path)


def draw(axis: Axes, curves: Curves, name: str, score: str) -> None:
    """Curves of a score against one of AXES, in a unit that suits them: the mean of the seeds, and its band."""
    key = AXES[name][0]
    ends = [bands.value(rows[-1], key) or 0.0 for runs in curves.values() for rows in runs if rows]
    steep = name != "virtual_seconds" and min(ends, default=0.0) > 0 and max(ends) > 20 * min(ends)
    unit = unit_of(name, math.sqrt(min(ends) * max(ends)) if steep else max(ends, default=1.0))
    for number, (label, runs) in enumerate(curves.items()):
        colour, dash = style(number)
        line = bands.band(runs, key, score)
        x = np.asarray(line.x) / unit.size
        axis.plot(x, line.mean, color=colour, dashes=dash or (None, None), lw=1.7, label=label, gid="curve")
        if line.low is not None and line.high is not None:
            edges = np.clip([line.low, line.high], 0, 1) if score in HIGHER else [line.low, line.high]
            axis.fill_between(x, *edges, color=colour, alpha=0.13, lw=0)
    if steep:
        axis.set_xscale("symlog", linthresh=max(1e-9, 10 ** math.floor(math.log10(min(ends) / unit.size))))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.12g}")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=name == "commits" and not unit.name))
        axis.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    every = [y for runs in curves.values() for rows in runs for y in bands.points(rows, key, score)[1]]
    if score in HIGHER and every:
        axis.set_ylim(max(0.0, min(every) - 0.03), min(1.0, max(every) + 0.02) + 0.005)
    elif every and min(every) > 0 and max(every) > 100 * min(every):
        axis.set_yscale("log")
    axis.set_xlabel(axis_label(name, unit))
    plain(axis)


def plain(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def draw_targets(axis: Axes, targets: Sequence[float], score: str) -> None:
    """A line across at each target, with its figure at the left."""
    for target in targets:
        axis.axhline(target, color=GREY, lw=1, ls=(0, (1, 3)), zorder=1)
        axis.annotate(
            f"target {target:g}", (0, target), xycoords=("axes fraction", "data"), xytext=(4, 3),
            textcoords="offset points", color=GREY, fontsize=8, path_effects=HALO,
        )  # fmt: skip


def label_ends(axis: Axes, least: float = 11.0) -> None:
    """The name of each curve beside its end, moved up or down until no two are in one place."""
    lines = [line for line in axis.get_lines() if line.get_gid() == "curve" and np.size(line.get_xydata())]
    ends = [axis.transData.transform(np.asarray(line.get_xydata())[-1]) for line in lines]
    scale = axis.figure.dpi / 72  # pixels of a point
    placed: list[tuple[float, float, float]] = []  # left, right, height of labels, in pixels
    for line, (x, y) in sorted(zip(lines, ends, strict=True), key=lambda pair: -pair[1][1]):
        text = str(line.get_label())
        left, right = x + 5 * scale, x + (7 + 5.2 * len(text)) * scale
        height = y
        for other in sorted(placed, key=lambda box: -box[2]):
            if left < other[1] and other[0] < right and height > other[2] - least * scale:
                height = other[2] - least * scale
        placed.append((left, right, height))
        axis.annotate(
            text, tuple(np.asarray(line.get_xydata())[-1]), xytext=(5, (height - y) / scale),
            textcoords="offset points", color=line.get_color(), fontsize=9, va="center", path_effects=HALO,
            annotation_clip=False,
        )  # fmt: skip


def points(series: Mapping[str, Mapping[str, float]], path: Path, x: str, y: str, title: str = "") -> Path:
    """Figures against the values of one setting, evenly spaced as they come."""
    figure, axis = plt.subplots(figsize=(6.5, 4))
    ticks = list(dict.fromkeys(value for values in series.values() for value in values))
    for number, (label, values) in enumerate(series.items()):
        colour, dash = style(number)
        axis.plot(
            [ticks.index(v) for v in values], list(values.values()), marker="o", color=colour,
            dashes=dash or (None, None), label=label,
        )  # fmt: skip
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set(xlabel=x, ylabel=y, title=title)
    plain(axis)
    axis.legend(frameon=False, handlelength=3)
    return save(figure, path)


def falling(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, x: str, y: str, title: str = "") -> Path:
    """Quantities that fall over powers of ten, one curve each."""
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for number, (label, places) in enumerate(curves.items()):
        colour, dash = style(number)
        axis.semilogy(*zip(*places, strict=True), color=colour, dashes=dash or (None, None), lw=1.8, label=label)
    axis.set(xlabel=x, ylabel=y, title=title)
    plain(axis)
    axis.legend(frameon=False, handlelength=3)
    return save(figure, path)


def heat_maps(
    maps: Mapping[str, Mapping[tuple[str, str], float]], path: Path, names: tuple[str, str], title: str = ""
) -> Path:
    """A map for each title: figures by (row, column), written into their boxes; what is not there stays white."""
    figure, axes = plt.subplots(1, len(maps), figsize=(4.2 * len(maps), 3.8), squeeze=False, layout="constrained")
    for axis, (label, table) in zip(axes[0], maps.items(), strict=True):
        rows, columns = (list(dict.fromkeys(key[side] for key in table)) for side in (0, 1))
        values = np.array([[table.get((row, column), math.nan) for column in columns] for row in rows])
        axis.imshow(values, cmap="viridis", aspect="auto")
        middle = np.nanmean([np.nanmin(values), np.nanmax(values)]) if np.isfinite(values).any() else 0.0
        for (i, j), value in np.ndenumerate(values):
            shown = f"{value:.3f}" if math.isfinite(value) else "-"
            axis.text(j, i, shown, ha="center", va="center", fontsize=8, color="w" if value < middle else "k")
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows)
        axis.set(xlabel=names[1], ylabel=names[0], title=label)
    figure.suptitle(title)
    return save(figure, path)


def paths(
    lines: Mapping[str, Any],
    path: Path,
    height: Callable[[Any, Any], Any],
    marks: Mapping[str, Any],
    names: Sequence[str],
) -> Path:
    """A panel for each path in a plane, [points, 2], over the contours of `height(x, y)`, with marked places."""
    every = np.concatenate([*lines.values(), *(np.atleast_2d(places) for places in marks.values())])
    low, high = every.min(axis=0), every.max(axis=0)
    edge = 0.08 * (high - low)
    grid = np.meshgrid(*(np.linspace(*ends, 120) for ends in zip(low - edge, high + edge, strict=True)))
    values = height(*grid)
    levels = np.geomspace(values.min() + 0.002 * np.ptp(values), values.max(), 14)
    wide = min(3, len(lines))
    figure, axes = plt.subplots(
        -(-len(lines) // wide), wide, figsize=(4 * wide, 3.4 * -(-len(lines) // wide)), squeeze=False, sharex=True,
        sharey=True, layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(lines) :]:
        axis.set_visible(False)
    for number, (axis, (label, line)) in enumerate(zip(axes.flat, lines.items(), strict=False)):
        axis.contour(*grid, values, levels=levels, colors="#bbbbbb", linewidths=0.6)
        axis.plot(*line.T, ".-", color=COLOURS[number % len(COLOURS)], ms=4, lw=1.2)
        for (name, places), sign in zip(marks.items(), ("k*", "kx", "ko"), strict=False):
            axis.plot(*np.atleast_2d(places).T, sign, ms=9 if sign == "k*" else 6, label=name)
        axis.set(title=label, xlabel=names[0], ylabel=names[1])
    axes[0, 0].legend(frameon=False, fontsize=8)
    return save(figure, path)
