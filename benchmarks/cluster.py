"""The picture of docs/cluster.md from kept figures: python benchmarks/cluster.py OUT.png FILE.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main(out: str, path: str) -> None:
    rows = json.loads(Path(path).read_text())["ray-cluster"]
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    for color, size in zip(("tab:blue", "tab:orange", "tab:green"), sorted({row["wave"] for row in rows}), strict=True):
        mine = [row for row in rows if row["wave"] == size]
        counts = [row["actors"] for row in mine]
        axis.plot(counts, [row["efficiency"] for row in mine], "o-", color=color, label=f"waves of {size:,}")
        alone = [row["efficiency against one device alone"] for row in mine]
        axis.plot(counts, alone, ":", color=color, label=f"{size:,}, against one device alone")
    axis.axhline(0.75, color="grey", linewidth=0.8)
    axis.set(xscale="log", xlabel="actors (asleep at an H200's rates)", ylabel="efficiency", ylim=(0, 1.1))
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
