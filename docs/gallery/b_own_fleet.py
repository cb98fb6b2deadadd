"""
Your own fleet
==============

Measured devices are a table, one row each; ``offbeat fleet from-csv`` reads the same file on the command line.
"""

import csv
import random
import tempfile
from pathlib import Path

from offbeat import Experiment, compare
from offbeat.fleets.make import build
from offbeat.fleets.measured import read_table
from offbeat.runs import fleet_plots, plots

# %%
# Thirty phones: the slower the processor, the slower the link.

folder = Path(tempfile.mkdtemp())
draw = random.Random(3)
with (folder / "phones.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["device", "step_ms", "down_mbit", "up_mbit", "latency_ms"])
    for number in range(30):
        slow = draw.lognormvariate(0, 0.8)
        table.writerow([f"phone {number}", round(15 * slow, 2), round(60 / slow, 1), round(20 / slow, 1), 40])

devices = read_table(folder / "phones.csv")
fleet = {"name": "measured", **devices.options}
fleet_plots.fleet(build("measured", 30, **devices.options), folder / "fleet.png")
print(f"{devices.devices} devices, the slowest {max(devices.options['step_seconds']):.3f} s for a step")

# %%
# Does waiting for the slow pay? Two methods, the same virtual time.

shared = {
    "task": {"name": "digits", "clients": 30},
    "fleet": fleet,
    "until": {"virtual_seconds": 8.0},
    "evaluate": {"every_seconds": 0.4},
    "device": "cpu",
}
methods = {"fedbuff": {"name": "fedbuff", "client_lr": 0.1}, "local-sgd": {"name": "local-sgd", "client_lr": 0.1}}
both = compare({label: Experiment(method=method, **shared) for label, method in methods.items()})
plots.comparison(both.curves(), folder / "curves.png", "thirty phones")
for label, (outcome,) in both.outcomes.items():
    print(f"{label}: {outcome.accuracy_final:.3f}, clients idle {outcome.idle_share:.0%} of the time")
