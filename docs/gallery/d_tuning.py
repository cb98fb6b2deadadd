"""
Rates that a method needs
=========================

Default rates are a start. Staleness asks for lower ones, small models bear higher ones; a comparison is only fair when
each method has had the same chance to find its own.
"""

import tempfile
import warnings
from pathlib import Path

from offbeat import Experiment, compare
from offbeat.errors import Diverging
from offbeat.runs import plots

# %%
# Six rates of FedBuff's clients, everything else equal. A comparison takes experiments by label.

shared = {
    "task": {"name": "digits", "clients": 30, "model": "logistic"},
    "fleet": "straggling",
    "until": {"virtual_seconds": 2.0},
    "evaluate": {"every_seconds": 0.1},
    "targets": (0.8,),
    "device": "cpu",
}
rates = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", Diverging)  # the largest rates diverge, as they should here
    tried = compare(
        {f"rate {rate:g}": Experiment(method={"name": "fedbuff", "client_lr": rate}, **shared) for rate in rates}
    )

folder = Path(tempfile.mkdtemp())
plots.comparison(tried.curves(), folder / "rates.png", "FedBuff", targets=(0.8,), against=("virtual_seconds",))

# %%
# The time to the target says which rate to take.

for label, (outcome,) in tried.outcomes.items():
    at = outcome.reached["0.8"]
    print(
        f"{label}: "
        + (f"80 % after {at['virtual_seconds']:.2f} s" if at else f"not reached, {outcome.accuracy_best:.3f}")
    )
