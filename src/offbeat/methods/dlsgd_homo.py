"""DLSGD-homo: delayed local SGD for identical clients, with receive buffers.

Delayed Local-SGD for distributed learning with linear speedup (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import local, optimisers, weights
from offbeat.numerics.rates import Rate
from offbeat.schedule.buffer import Buffer


@takes_policy()
def dlsgd_homo(
    when: Policy = Buffer(10, restart="fresh", overlap=True),  # server 2, 4, 8; client 2-3
    client_lr: Rate = 0.05,
    server_lr: Rate = 0.3,
    client_options: Mapping[str, Any] | None = None,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """The server steps on the first n updates to arrive; every version is broadcast to all receive buffers.

    A client trains at most once from a version. With `overlap` (the buffers' purpose) transfers run beside computing;
    without it a client uploads, then pulls, then trains.
    """
    optimiser = optimisers.server_optimiser(server_lr, server_optimiser)

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, mean["delta"], cohort.version)  # server 7

    steps = local.sgd(client_lr, client_options)  # client 4-9
    rule = Rule(steps, init=optimiser.init, weigh=weights.mean, apply=apply)  # server 6
    return Method("dlsgd-homo", when, rule)
