"""Pictures of runs: accuracy against virtual time, commits and samples; a schedule as a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from offbeat.records import Arrived, Begun, Commit, Finished, Row

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#e09f3e", "#6a4c93", "#3d3d3d", "#00a6a6", "#b5651d")
TRANSFERS = {"download": "#cfe3f2", "upload": "#f6d7c3"}
AXES = (("virtual_seconds", "virtual seconds"), ("commits", "commits"), ("samples", "samples"))

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
    for number, (label, runs) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        for axis, (name, spoken) in zip(axes, AXES, strict=True):
            key = "commit" if name == "commits" else name
            for seed, rows in enumerate(runs):
                axis.plot(
                    [row[key] for row in rows], [row[score] for row in rows], color=colour,
                    lw=1.8 if len(runs) == 1 else 1.0, alpha=1.0 if len(runs) == 1 else 0.6,
                    label=label if seed == 0 else None,
                )  # fmt: skip
            ends = [rows[-1][key] for runs in curves.values() for rows in runs]
            if name == "commits" and max(ends) > 20 * min(ends) > 0:
                axis.set_xscale("symlog", linthresh=10)
            axis.set_xlabel(spoken)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(score)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title)
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
