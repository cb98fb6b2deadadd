"""The picture of docs/performance.md from kept figures: python benchmarks/picture.py OUT.png LABEL=FILE.json ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main(out: str, *given: str) -> None:
    figure, axes = plt.subplots(1, len(given), figsize=(5.2 * len(given), 3.8), squeeze=False)
    for axis, text in zip(axes[0], given, strict=True):
        label, _, path = text.partition("=")
        found = json.loads(Path(path).read_text())
        rows = found["waves"] if "waves" in found else found["waves and attainable"]["waves"]
        for color, model in zip(("tab:blue", "tab:orange", "tab:green"), ("LR", "MLP", "CNN"), strict=True):
            mine = [row for row in rows if row["model"] == model]
            sizes = [row["clients"] for row in mine]
            axis.plot(sizes, [row["wave"] for row in mine], "o-", color=color, label=f"{model}, wave")
            axis.plot(sizes, [row["plain"] for row in mine], ":", color=color, label=f"{model}, plain loop")
        axis.set(xscale="log", yscale="log", xlabel="clients in the wave", title=label)
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("client-steps per second")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
