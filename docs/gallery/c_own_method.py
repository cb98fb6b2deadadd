"""
Your own method
===============

A method is a policy (when) and a rule (what). The rule is written for one client, on one flat vector, as the paper's
formula; the engine adds the clients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat import Buffer, Experiment, Local, Method, Rule, run
from offbeat.laws import check_method
from offbeat.numerics.weights import mean

# %%
# Sign descent: every local step moves each weight by the rate, in the direction of the gradient's sign. Gradients are
# taken at the first field of what is carried from step to step.


class Walk(NamedTuple):
    y: Tensor


def sign_descent(buffer_size: int = 5, local_steps: int = 5, client_lr: float = 0.002) -> Method:
    """Steps of fixed size, and the mean of what a buffer of clients found."""
    local = Local(
        lambda server, job: Walk(server["model"]),
        lambda walk, gradient, job: Walk(walk.y - job.lr * torch.sign(gradient)),
        lambda server, walk, job: {"delta": server["model"] - walk.y},
        {"lr": lambda version: client_lr},
        sends=("delta",),
    )

    def apply(server, sums, cohort):
        return server | {"model": server["model"] - sums["delta"]}

    rule = Rule(local, init=lambda model: {"model": model}, weigh=mean, apply=apply)
    return Method("sign-descent", Buffer(buffer_size, local_steps), rule)


# %%
# It runs like any other.

done = run(
    Experiment(
        method=sign_descent(),
        task={"name": "digits", "clients": 20},
        fleet="straggling",
        until={"commits": 60},
        device="cpu",
    )
)
print(f"{done.method}: {done.accuracy_final:.3f} after {done.virtual_seconds:.2f} virtual s")

# %%
# The laws that every method must keep, tried on it: the same answer on both engines, the same bits after a resume, and
# so on. ``offbeat check module:function`` does the same on the command line.

for finding in check_method(sign_descent):
    print("holds" if finding.holds else "BROKEN", finding.law)
