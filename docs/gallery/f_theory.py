"""
What theory says
================

The papers' theorems speak of constants of a problem. ``measure`` finds them, ``advise`` asks the theorems.
"""

from offbeat import Experiment
from offbeat.theory.advise import advise, opening
from offbeat.theory.measure import Effort, measure

problem = Experiment(
    method={"name": "local-sgd", "n": None, "local_steps": 5, "client_lr": 0.05},
    task={"name": "digits", "clients": 10, "split": {"name": "single-label", "percent": 50}},
    until={"commits": 500},
    device="cpu",
)
found = measure(problem, train=20, effort=Effort(samples=50, rounds=5))
for reading in found.readings[:5]:
    print(f"{reading.symbol:10} {reading.value:<8.3g} {reading.said}")
print(found.verdict)

# %%
# One sentence to act on, then each theorem.

plan, counsels = advise(found, problem, "local-sgd")
print(opening(problem, "local-sgd", plan, counsels))
for name, counsel in counsels.items():
    if counsel.own is None:
        print(f"{name}: {counsel.refused[0]}")
    else:
        print(f"{name}: client_lr {counsel.own.client_lr:.3g}, server_lr {counsel.own.server_lr:.3g}")
