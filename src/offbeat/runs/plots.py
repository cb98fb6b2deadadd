"""Pictures of runs: curves against time, commits and samples, points, heat maps, paths; a schedule as a timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import networkx as nx
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from offbeat.fleets.fleet import Fleet
from offbeat.records import Arrived, Begun, Commit, Finished, Row

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#e09f3e", "#6a4c93", "#3d3d3d", "#00a6a6", "#b5651d")
TRANSFERS = {"download": "#cfe3f2", "upload": "#f6d7c3"}
AXES = {"virtual_seconds": "virtual seconds", "commits": "commits", "samples": "samples"}

Curves = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]  # label -> one list of metrics rows per seed


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path


def comparison(curves: Curves, path: Path, title: str = "") -> Path:
    """Three panels: the same curves against virtual time, commits and samples. Thin lines are single seeds."""
    score = "accuracy" if all(row["accuracy"] is not None for runs in curves.values() for row in runs[0]) else "loss"
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
    for axis, name in zip(axes, AXES, strict=True):
        draw(axis, curves, name, score)
    axes[0].set_ylabel(score)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title)
    return save(figure, path)


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
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return save(figure, path)


def draw(axis: Axes, curves: Curves, name: str, score: str) -> None:
    """Curves of a score against one of AXES."""
    key = "commit" if name == "commits" else name
    for number, (label, runs) in enumerate(curves.items()):
        for seed, rows in enumerate(runs):
            axis.plot(
                [row[key] for row in rows], [row[score] for row in rows], color=COLOURS[number % len(COLOURS)],
                lw=1.8 if len(runs) == 1 else 1.0, alpha=1.0 if len(runs) == 1 else 0.6,
                label=label if seed == 0 else None,
            )  # fmt: skip
    ends = [rows[-1][key] for runs in curves.values() for rows in runs]
    if name == "commits" and max(ends) > 20 * min(ends) > 0:
        axis.set_xscale("symlog", linthresh=10)
    axis.set_xlabel(AXES[name])
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def points(series: Mapping[str, Mapping[str, float]], path: Path, x: str, y: str, title: str = "") -> Path:
    """Figures against the values of one setting, evenly spaced as they come."""
    figure, axis = plt.subplots(figsize=(6.5, 4))
    ticks = list(dict.fromkeys(value for found in series.values() for value in found))
    for (label, found), colour in zip(series.items(), COLOURS, strict=False):
        axis.plot([ticks.index(v) for v in found], list(found.values()), "o-", color=colour, label=label)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set(xlabel=x, ylabel=y, title=title)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return save(figure, path)


def falling(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, x: str, y: str, title: str = "") -> Path:
    """Quantities that fall over powers of ten, one curve each."""
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for number, (label, points) in enumerate(curves.items()):
        axis.semilogy(*zip(*points, strict=True), color=COLOURS[number % len(COLOURS)], lw=1.8, label=label)
    axis.set(xlabel=x, ylabel=y, title=title)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return save(figure, path)


def heat_maps(
    maps: Mapping[str, Mapping[tuple[str, str], float]], path: Path, names: tuple[str, str], title: str = ""
) -> Path:
    """A map for each title: figures by (row, column), written into their boxes; what is not there stays white."""
    figure, axes = plt.subplots(1, len(maps), figsize=(4.2 * len(maps), 3.8), squeeze=False, layout="constrained")
    for axis, (label, found) in zip(axes[0], maps.items(), strict=True):
        rows, columns = (list(dict.fromkeys(key[side] for key in found)) for side in (0, 1))
        values = np.array([[found.get((row, column), math.nan) for column in columns] for row in rows])
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
    found: Mapping[str, Any],
    path: Path,
    height: Callable[[Any, Any], Any],
    marks: Mapping[str, Any],
    names: Sequence[str],
) -> Path:
    """A panel for each path in a plane, [points, 2], over the contours of `height(x, y)`, with marked places."""
    every = np.concatenate([*found.values(), *(np.atleast_2d(places) for places in marks.values())])
    low, high = every.min(axis=0), every.max(axis=0)
    edge = 0.08 * (high - low)
    grid = np.meshgrid(*(np.linspace(*ends, 120) for ends in zip(low - edge, high + edge, strict=True)))
    values = height(*grid)
    levels = np.geomspace(values.min() + 0.002 * np.ptp(values), values.max(), 14)
    wide = min(3, len(found))
    figure, axes = plt.subplots(
        -(-len(found) // wide), wide, figsize=(4 * wide, 3.4 * -(-len(found) // wide)), squeeze=False, sharex=True,
        sharey=True, layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for number, (axis, (label, line)) in enumerate(zip(axes.flat, found.items(), strict=False)):
        axis.contour(*grid, values, levels=levels, colors="#bbbbbb", linewidths=0.6)
        axis.plot(*line.T, ".-", color=COLOURS[number % len(COLOURS)], ms=4, lw=1.2)
        for (name, places), sign in zip(marks.items(), ("k*", "kx", "ko"), strict=False):
            axis.plot(*np.atleast_2d(places).T, sign, ms=9 if sign == "k*" else 6, label=name)
        axis.set(title=label, xlabel=names[0], ylabel=names[1])
    axes[0, 0].legend(frameon=False, fontsize=8)
    return save(figure, path)


def clusters(fleet: Fleet, path: Path, most: int = 16) -> Path:
    """A panel for each cluster (the first `most`): devices shaded by their seconds per step, links by their weight."""
    each = fleet.clusters.each[:most] if fleet.clusters is not None else ()
    wide = min(4, len(each))
    rows = -(-len(each) // wide)
    figure, axes = plt.subplots(rows, wide, figsize=(3.3 * wide, 3.5 * rows), squeeze=False, layout="constrained")
    slowest = max(float(fleet.step_seconds.max()), 1e-12)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (axis, cluster) in enumerate(zip(axes.flat, each, strict=False)):
        together = nx.compose_all([nx.Graph(graph) for graph in cluster.graphs])
        draws = nx.kamada_kawai_layout if cluster.size <= 64 else nx.circular_layout
        places = draws(together)
        weights = np.mean([matrix + matrix.T for matrix in cluster.mixing], axis=0) / 2
        widths = [0.5 + 6 * weights[i, j] for i, j in together.edges]
        pace = fleet.step_seconds[list(cluster.members)] / slowest
        nx.draw_networkx_edges(together, places, ax=axis, width=widths, edge_color="#8fb3cf")
        nx.draw_networkx_nodes(together, places, ax=axis, node_size=240, node_color=pace, cmap="YlOrBr", vmin=0.0,
                               vmax=1.2, edgecolors="#3d3d3d", linewidths=0.7)  # fmt: skip
        named = dict(enumerate(cluster.members)) if cluster.size <= 40 else {}
        nx.draw_networkx_labels(together, places, named, ax=axis, font_size=7)
        links = sum(graph.number_of_edges() for graph in cluster.graphs)
        axis.set_title(f"cluster {number}: {cluster.size} devices, {links} links\nrho = {cluster.rho:.3f}", fontsize=9)
        axis.margins(0.15)
    return save(figure, path)


def timeline(panels: Mapping[str, Sequence[Row]], path: Path, until: float, clients: int) -> Path:
    """Who does what when: a bar per client with transfers light and local steps dark, a line per commit."""
    figure, axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 0.45 * clients + 1.6), squeeze=False)
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        for since, end, client, kind, version in spans(rows):
            shade = TRANSFERS.get(kind, COLOURS[version % len(COLOURS)])
            axis.barh(client + 1, end - since, left=since, height=0.62, color=shade)
            if kind == "compute":
                axis.text((since + end) / 2, client + 1, f"w{version}", ha="center", va="center", color="w", fontsize=7)
        for now, record in rows:
            if isinstance(record, Arrived):
                axis.axvline(now, color="#9ecae1", lw=0.9, ls=":")
            elif isinstance(record, Commit):
                axis.axvline(now, color="#1b6ca8", lw=1.6)
        axis.set(title=title, xlim=(0, until), xlabel="virtual seconds", ylabel="client")
        axis.set_yticks(range(1, clients + 1))
        axis.spines[["top", "right"]].set_visible(False)
    keys: list[Artist] = [Patch(color=shade, label=kind) for kind, shade in TRANSFERS.items()]
    keys += [
        Patch(color=COLOURS[0], label="local steps from version w"),
        Line2D([], [], color="#1b6ca8", label="commit"),
    ]
    keys.append(Line2D([], [], color="#9ecae1", ls=":", label="arrival"))
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), frameon=False, bbox_to_anchor=(0.5, -0.09))
    return save(figure, path)


def spans(rows: Sequence[Row]) -> list[tuple[float, float, int, str, int]]:
    """(from, to, client, what, version) of downloads, local steps and uploads."""
    found: list[tuple[float, float, int, str, int]] = []
    ordered: dict[int, float] = {}
    begun: dict[tuple[int, int], tuple[float, int]] = {}
    finished: dict[tuple[int, int], float] = {}
    for now, record in rows:
        name = type(record).__name__
        if name == "Start":
            ordered[record.client] = now  # type: ignore[union-attr]
        elif isinstance(record, Begun):
            if record.client in ordered:
                found.append((ordered.pop(record.client), now, record.client, "download", record.version))
            begun[record[:2]] = (now, record.version)
        elif isinstance(record, Finished):
            since, version = begun[record[:2]]
            found.append((since, now, record.client, "compute", version))
            finished[record[:2]] = now
        elif isinstance(record, Arrived):
            found.append((finished[record[:2]], now, record.client, "upload", record.version))
    return found
