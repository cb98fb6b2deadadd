"""Pictures of fleets and schedules: clusters as graphs, speeds and links of clients, who does what when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from offbeat.fleets.clusters import MBIT, Cluster
from offbeat.fleets.fleet import Fleet
from offbeat.records import Arrived, Row
from offbeat.runs.cluster_layout import alike, layout, named, together
from offbeat.runs.palette import COLOURS, GREY, unit_of
from offbeat.runs.plots import HALO, plain, save
from offbeat.runs.timeline import timeline_of

TRANSFERS = {"download": "#cfe3f2", "upload": "#f6d7c3"}
VERSIONS = "cividis"  # light to dark over the run: no two versions of one shade, for every kind of colour vision


# ---- clusters -----------------------------------------------------------------------------------
def clusters(fleet: Fleet, path: Path, most: int = 12) -> Path:
    """The whole fleet as one graph around its server, then a panel for each kind of cluster (the first `most`):
    devices shaded by their seconds per step, links by their weight. Clusters that are alike share a panel."""
    each = fleet.clusters.each if fleet.clusters is not None else ()
    kinds = list(alike(each, fleet).values())
    shown = kinds[:most]
    rows = -(-(1 + len(shown)) // 4)
    wide = -(-(1 + len(shown)) // rows)
    figure, axes = plt.subplots(rows, wide, figsize=(3.8 * wide, 4.0 * rows), squeeze=False, layout="constrained")
    low, high = float(fleet.step_seconds.min()), float(fleet.step_seconds.max())
    pace = Normalize(low, high if high > low else low + 1)
    for axis in axes.flat:
        axis.set_axis_off()
    overview(axes.flat[0], each, fleet, pace)
    for axis, numbers in zip(axes.flat[1:], shown, strict=False):
        cluster = each[numbers[0]]
        graph = together(cluster)
        places = layout(graph)
        weights = np.mean([matrix + matrix.T for matrix in cluster.mixing], axis=0) / 2
        heaviest = max((weights[i, j] for i, j in graph.edges), default=1.0) or 1.0
        widths = [0.6 + 3.4 * weights[i, j] / heaviest for i, j in graph.edges]
        nx.draw_networkx_edges(graph, places, ax=axis, width=widths, edge_color="#8fb3cf")
        speeds = fleet.step_seconds[list(cluster.members)]
        shades = [colormaps["YlOrBr"](0.08 + 0.8 * pace(s)) for s in speeds]
        nx.draw_networkx_nodes(graph, places, ax=axis, node_size=260 if cluster.size <= 40 else 30,
                               node_color=shades, edgecolors="#3d3d3d", linewidths=0.7)  # fmt: skip
        if cluster.size <= 40:
            names = dict(enumerate(cluster.members))
            for node, (x, y) in places.items():
                dark = np.dot(shades[node][:3], (0.3, 0.6, 0.1)) < 0.5
                axis.text(x, y, names[node], ha="center", va="center", fontsize=7, color="w" if dark else "k")
        links = sum(g.number_of_edges() for g in cluster.graphs)
        more = "" if len(cluster.graphs) == 1 else f" over {len(cluster.graphs)} exchanges"
        axis.set_title(
            f"{named(numbers)}: {cluster.size} devices, {links} links{more}\nrho = {cluster.rho:.3f}, "
            f"weight of a link up to {heaviest:.2g}", fontsize=9,
        )  # fmt: skip
        axis.margins(0.15)
        axis.set_aspect("equal")
    if high > low:
        scale = ScalarMappable(pace, shaded("YlOrBr", 0.08, 0.88))
        bar = figure.colorbar(scale, ax=axes, location="bottom", shrink=0.4, aspect=40, pad=0.02)
        bar.set_label("seconds per local step")
    if len(kinds) > most:
        figure.suptitle(f"{len(kinds) - most} further kinds of clusters are not shown", fontsize=9, color=GREY)
    return save(figure, path)


def shaded(name: str, low: float, high: float) -> Any:
    """A part of a colour map."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(f"{name} {low}", colormaps[name](np.linspace(low, high, 64)))


def overview(axis: Axes, each: Sequence[Cluster], fleet: Fleet, pace: Normalize) -> None:
    """The server in the middle, every cluster around it with its own links; lines to the server are not to scale."""
    radius = 0.9 * math.sin(math.pi / max(3, len(each)))
    axis.plot(0, 0, marker="s", ms=13, color=COLOURS[0], zorder=3)
    axis.annotate("server", (0, 0), xytext=(9, -13), textcoords="offset points", fontsize=8, path_effects=HALO)
    for number, cluster in enumerate(each):
        angle = math.pi / 2 - 2 * math.pi * number / len(each)
        centre = np.array([1.45 * math.cos(angle), 1.45 * math.sin(angle)]) if len(each) > 1 else np.array([0.0, 1.3])
        graph = together(cluster)
        spread = {node: centre + radius * np.asarray(place) for node, place in layout(graph).items()}
        for i, j in graph.edges if graph.number_of_edges() < 2000 else ():
            axis.plot(*zip(spread[i], spread[j], strict=True), color="#8fb3cf", lw=0.6, zorder=1)
        edge = centre * (1 - radius / max(math.hypot(*centre), 1e-9))
        axis.plot([0, edge[0]], [0, edge[1]], color=COLOURS[0], lw=0.8, dashes=(2, 2), zorder=0)
        shades = [colormaps["YlOrBr"](0.08 + 0.8 * pace(s)) for s in fleet.step_seconds[list(cluster.members)]]
        dots = np.array([spread[node] for node in range(cluster.size)])
        area = max(4, min(26, 900 / fleet.clients))
        axis.scatter(dots[:, 0], dots[:, 1], s=area, c=shades, edgecolors="#3d3d3d", linewidths=0.4, zorder=2)
    clusters = f"{len(each)} clusters" if len(each) != 1 else "1 cluster"
    axis.set_title(f"{fleet.name}: {fleet.clients} devices in {clusters}\nrho at most "
                   f"{max((c.rho for c in each), default=0.0):.3f}", fontsize=9)  # fmt: skip
    axis.set_aspect("equal")


# ---- a fleet ------------------------------------------------------------------------------------
def fleet(given: Fleet, path: Path, title: str = "") -> Path:
    """How many clients are at least as fast: seconds per local step, and the links both ways."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    share = np.arange(1, given.clients + 1) / given.clients
    steps = np.sort(given.step_seconds)
    unit = unit_of("virtual_seconds", float(steps[-1]))
    axes[0].step([steps[0] / unit.size, *(steps / unit.size)], [0, *share], where="post", color=COLOURS[0], lw=1.8)
    axes[0].axvline(float(np.median(steps)) / unit.size, color=GREY, lw=1, ls=(0, (1, 3)))
    axes[0].annotate(
        f"median {np.median(steps):.3g} s", (float(np.median(steps)) / unit.size, 0.02), xytext=(4, 0),
        textcoords="offset points", fontsize=8, color=GREY,
    )  # fmt: skip
    axes[0].set(xlabel=f"seconds per local step ({unit.name})" if unit.name != "s" else "seconds per local step",
                ylabel="share of the clients")  # fmt: skip
    for number, (label, speeds) in enumerate((("down", given.down_bandwidth), ("up", given.up_bandwidth))):
        known = np.sort(speeds[np.isfinite(speeds)]) / MBIT
        if not len(known):
            continue
        axes[1].step(
            [known[0], *known], [0, *(np.arange(1, len(known) + 1) / given.clients)], where="post",
            color=COLOURS[number], lw=1.8, ls=("-", "--")[number], label=label,
        )  # fmt: skip
    if axes[1].lines:
        axes[1].legend(frameon=False, loc="lower right")
    else:
        axes[1].text(0.5, 0.5, "links take no time for bytes", ha="center", transform=axes[1].transAxes, color=GREY)
    axes[1].set(xlabel="link (Mbit/s)")
    for axis, values in ((axes[0], steps), (axes[1], np.concatenate([given.down_bandwidth, given.up_bandwidth]))):
        known = values[np.isfinite(values) & (values > 0)]
        if len(known) and known.max() > 30 * known.min():
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.12g}")
        elif len(known):
            axis.set_xlim(0)
        axis.set_ylim(0, 1.02)
        plain(axis)
    figure.suptitle(title or f"{given.name}: {given.clients} clients")
    return save(figure, path)


# ---- a schedule ---------------------------------------------------------------------------------
def timeline(panels: Mapping[str, Sequence[Row]], path: Path, until: float, clients: int) -> Path:
    """Who does what when: a bar per client with transfers light and local steps shaded by the version they start
    from, a line per commit with the version that it makes, a triangle where an update arrives."""
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(11, (0.42 * clients + 1.3) * len(panels)), squeeze=False, layout="constrained",
        sharex=True,
    )  # fmt: skip
    for axis, (title, rows) in zip(axes[:, 0], panels.items(), strict=True):
        line = timeline_of(rows)
        last = max((span.version for span in line.spans), default=0)
        for span in line.spans:
            part = 0.0 if last == 0 else span.version / last
            shade = TRANSFERS.get(span.kind) or colormaps[VERSIONS](0.05 + 0.9 * part)
            quiet = span.kind not in ("compute", *TRANSFERS)
            axis.barh(span.client + 1, span.end - span.since, left=span.since, height=0.62, zorder=2,
                      color="#eeeeee" if quiet else shade)  # fmt: skip
            if span.kind == "compute":
                axis.text((span.since + span.end) / 2, span.client + 1, f"v{span.version}", ha="center", va="center",
                          color="k" if part > 0.5 else "w", fontsize=7, zorder=3, clip_on=True)  # fmt: skip
        crowded = -math.inf
        for number, now in enumerate(line.commits):
            axis.axvline(now, color=COLOURS[1], lw=1.0, zorder=1)
            if now - crowded > until / 55 and now <= until:
                axis.annotate(
                    f"v{number + 1}", (now, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), ha="center",
                    textcoords="offset points", fontsize=7, color=COLOURS[1],
                )  # fmt: skip
                crowded = now
        for now, record in rows:
            if isinstance(record, Arrived):
                axis.plot(now, record.client + 1 - 0.36, marker="^", ms=4, color="#3d3d3d", zorder=4)
        axis.set_title(title, fontsize=10, pad=16)
        axis.set(xlim=(0, until), ylim=(0.3, clients + 0.7), ylabel="client")
        axis.set_yticks(range(1, clients + 1))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("virtual seconds")
    keys: list[Artist] = [Patch(color=shade, label=kind) for kind, shade in TRANSFERS.items()]
    keys += [
        Patch(color=colormaps[VERSIONS](0.05), label="local steps from version v, early"),
        Patch(color=colormaps[VERSIONS](0.95), label="... and late"),
        Line2D([], [], color=COLOURS[1], label="commit, and the version it makes"),
        Line2D([], [], color="#3d3d3d", marker="^", ls="", ms=4, label="arrival"),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return save(figure, path)
