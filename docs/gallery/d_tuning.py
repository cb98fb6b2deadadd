"""
Rates that a method needs
=========================

Default rates are a start. Staleness asks for lower ones, small models bear higher ones; a comparison is only fair when
each method has had the same chance to find its own. ``offbeat tune`` gives it that chance, and ``offbeat compare
--tuned`` compares afterwards. The same from Python, with few trials so that this page builds quickly.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from offbeat import Experiment, compare
from offbeat.runs import plots
from offbeat.studies.tuning import Between, tune

# %%
# Two methods with the same budget. Trials are judged by a part of every client's samples that nobody trains on; the
# test set is not looked at. Each looks for the rate that reaches 80 % soonest.

shared = {
    "task": {"name": "digits", "clients": 30, "model": "logistic"},
    "fleet": "straggling",
    "until": {"virtual_seconds": 5.0, "accuracy": 0.8},
    "evaluate": {"every_seconds": 0.05},
    "device": "cpu",
}
methods = {"fedbuff": {"buffer_size": 5, "local_steps": 4}, "local-sgd": {"n": 10, "local_steps": 4}}
experiments = {label: Experiment(method={"name": label, **options}, **shared) for label, options in methods.items()}
folder = Path(tempfile.mkdtemp())
found = tune(experiments, {"client_lr": Between(0.01, 3.0)}, target=0.8, trials=6, seeds=(0, 1), out=folder / "tune")
for label, best in found.best.items():
    print(f"{label}: client_lr = {best['client_lr']:.3g}, {-found.scores[label]:.2f} s to 80 % of the held-out samples")

# %%
# Every trial is in the ledger. Those that could not win any more were cut off; the best few were run again with a fresh
# seed.

for entry in found.entries:
    times = ", ".join(f"{-score:.2f} s" if score and found.aim.reached(score) else "-" for score in entry.scores)
    told = "with a fresh seed" if entry.fresh else "cut off" if entry.cut else ""
    print(f"{entry.label} {entry.options['client_lr']:.3g}: {times} {told}")

# %%
# What was found, beside the defaults, with all of the training data and the test set. In the folder, ``tuned.toml`` is
# the config of such a comparison, as ``offbeat compare --tuned`` takes it.

tuned = {
    f"{label}, tuned": replace(experiment, method={**experiment.method, **found.best[label]})
    for label, experiment in experiments.items()
}
compared = compare({**tuned, **{f"{label}, default": experiment for label, experiment in experiments.items()}})
plots.comparison(compared.curves(), folder / "rates.png", "Tuned", targets=(0.8,), against=("virtual_seconds",))
for label, (outcome,) in compared.outcomes.items():
    at = outcome.reached["0.8"]
    print(
        f"{label}: "
        + (f"80 % after {at['virtual_seconds']:.2f} s" if at else f"not reached, {outcome.accuracy_best:.3f}")
    )
