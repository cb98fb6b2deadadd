"""DLSGD-hetero: delayed local SGD for different clients, drawn uniformly, with receive and send buffers.

Delayed Local-SGD for distributed learning with linear speedup (Algorithm 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import local, optimisers, weights
from offbeat.numerics.rates import Rate
from offbeat.schedule.sampled import Sampled


@takes_policy()
def dlsgd_hetero(
    when: Policy = Sampled(10),  # server 2, 4, 5, 9; client 2, 12
    client_lr: Rate = 0.05,
    server_lr: Rate = 1.0,
    client_options: Mapping[str, Any] | None = None,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """n clients drawn with replacement hand over their newest finished update; the mean runs over the multiset.

    Everyone trains all the time, at most once from a version; updates nobody asked for are overwritten.
    """
    optimiser = optimisers.server_optimiser(server_lr, server_optimiser)

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, mean["delta"], cohort.version)  # server 8

    steps = local.sgd(client_lr, client_options)  # client 4-10
    rule = Rule(steps, init=optimiser.init, weigh=weights.mean, apply=apply)  # server 7
    return Method("dlsgd-hetero", when, rule)
