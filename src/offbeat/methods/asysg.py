"""AsySG: asynchronous parallel stochastic gradient; the server steps on every n stale gradients.

Lian, Huang, Li, Liu: Asynchronous parallel stochastic gradient for nonconvex optimization. NeurIPS 2015
(Algorithm 1, AsySG-con: M gradients per update; we divide by M, as the DLSGD paper's comparison does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import local, optimisers, weights
from offbeat.numerics.rates import Rate
from offbeat.schedule.buffer import Buffer


@takes_policy(local_steps=None)
def asysg(
    when: Policy = Buffer(10, steps=1),
    server_lr: Rate = 0.1,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """Clients pull the model, send one stochastic gradient, pull again; w <- w - server_lr * mean of n of them."""
    optimiser = optimisers.server_optimiser(server_lr, server_optimiser)

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, mean["gradient"], cohort.version)

    return Method("asysg", when, Rule(local.gradient(), init=optimiser.init, weigh=weights.mean, apply=apply))
