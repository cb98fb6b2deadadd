"""The picture of docs/performance.md from kept figures: python benchmarks/picture.py OUT.png LABEL=FILE.json ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from offbeat.runs.palette import COLOURS


def main(out: str, *given: str) -> None:
    figure, axes = plt.subplots(1, len(given), figsize=(5.6 * len(given), 4.2), squeeze=False, layout="constrained")
    for axis, text in zip(axes[0], given, strict=True):
        label, _, path = text.partition("=")
        found = json.loads(Path(path).read_text())
        rows = found["waves"] if "waves" in found else found["waves and attainable"]["waves"]
        for colour, mark, model in zip(COLOURS, "os^", ("LR", "MLP", "CNN"), strict=False):
            mine = [row for row in rows if row["model"] == model]
            for how, dash in (("wave", "-"), ("plain", ":")):
                best = [row[how] for row in mine]
                slower = [row[how] - row.get(f"{how}, slowest", row[how]) for row in mine]
                sizes = [row["clients"] for row in mine]
                axis.errorbar(
                    sizes, best, yerr=[slower, [0] * len(best)], color=colour, ls=dash, capsize=3, lw=1.6, ms=5,
                    marker=mark if how == "wave" else None,
                )  # fmt: skip
                axis.annotate(
                    f"{model}, {'wave' if how == 'wave' else 'loop'}", (sizes[-1], best[-1]), xytext=(7, 0),
                    textcoords="offset points", color=colour, fontsize=8, va="center", annotation_clip=False,
                )  # fmt: skip
        sizes = sorted({row["clients"] for row in rows})
        axis.set(xscale="log", yscale="log", xlabel="clients in the wave", title=label)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("client-steps per second\n(best run; bars reach to the slowest)")
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
