"""Mini-batch SGD: synchronous rounds of one gradient each; the baseline without local work.

Dekel, Gilad-Bachrach, Shamir, Xiao: Optimal distributed online prediction using mini-batches. JMLR 13, 2012.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import local, optimisers, weights
from offbeat.numerics.rates import Rate
from offbeat.schedule.rounds import Rounds


@takes_policy(local_steps=None)
def minibatch_sgd(
    when: Policy = Rounds(steps=1),
    server_lr: Rate = 0.1,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """n clients (None: all) send one stochastic gradient each; w <- w - server_lr * their mean."""
    optimiser = optimisers.server_optimiser(server_lr, server_optimiser)

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, mean["gradient"], cohort.version)

    return Method("minibatch-sgd", when, Rule(local.gradient(), init=optimiser.init, weigh=weights.mean, apply=apply))
