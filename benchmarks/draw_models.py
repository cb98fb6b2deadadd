"""`python benchmarks/draw_models.py results/models.json docs/pictures/models.png`: waves and the plain loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def draw(source: Path, picture: Path) -> None:
    found = json.loads(source.read_text())
    rows = sorted(found["models"], key=lambda row: row["ratio"])
    figure = Figure(figsize=(8, 0.42 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.hlines(places, [row["plain"] for row in rows], [row["wave"] for row in rows], color="#bbbbbb", linewidth=2)
    axes.plot([row["plain"] for row in rows], places, "o", color="#d55e00", label="plain loop")
    axes.plot([row["wave"] for row in rows], places, "s", color="#0072b2", label="wave of 50 clients")
    for place, row in enumerate(rows):
        axes.annotate(f"{row['ratio']:.0f} x", (row["wave"], place), (8, 0), textcoords="offset points", va="center")
    axes.set_yticks(list(places), [row["model"] for row in rows])
    axes.set_xscale("log")
    axes.set_xlim(right=4 * max(row["wave"] for row in rows))
    axes.set_xlabel(f"client-steps per second, {found['facts']['device']}, {found['facts']['precision']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
