"""
Choosing for a fleet
====================

``offbeat choose`` measures the problem, drops what cannot work, tunes the rest briefly on held-out data and runs the
best over seeds. The same from Python, with few trials so that this page builds quickly.
"""

from offbeat import Experiment
from offbeat.studies.choosing import choose, rows

problem = Experiment(
    task={"name": "digits", "clients": 20, "model": "logistic"},
    fleet={"name": "lognormal", "sigma": 1.2, "latency": 0.02},
    until={"virtual_seconds": 3.0},
    device="cpu",
)
found = choose(problem, target=0.8, methods=("local-sgd", "fedbuff", "fedasync", "hl-sgd"), trials=4, seeds=2)

# %%
# The answer, why, and what was dropped.

print(found.best.method, found.best.options)
print(found.reason)
for name, why in found.dropped.items():
    print(f"dropped {name}: {why}")

# %%
# The ranking, with 95 % intervals over seeds, and the config to run.

for row in rows(found):
    print(" | ".join(row))
print(found.experiment.toml())
