"""FedProx: local steps are pulled back to the model that they began from.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks. MLSys 2020 (Algorithm 2;
the inexact local solver is SGD). The paper samples clients by size and averages equally; `weights` says it either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import local, optimisers
from offbeat.numerics.rates import Rate
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.rounds import Rounds


@takes_policy()
def fedprox(
    when: Policy = Rounds(),  # 2-3
    client_lr: Rate = 0.05,
    server_lr: Rate = 1.0,
    proximal: float = 0.1,
    weights: Weights = "size",
    client_options: Mapping[str, Any] | None = None,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """n clients (None: all) minimise f_i(y) + proximal / 2 |y - w|^2 by SGD steps; w <- w - server_lr * mean(delta)."""
    share, optimiser = shares(weights), optimisers.server_optimiser(server_lr, server_optimiser)

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, mean["delta"], cohort.version)  # 6

    steps = local.sgd(client_lr, client_options, proximal)  # 4
    rule = Rule(steps, init=optimiser.init, weigh=share.of, apply=apply, clients=share.clients)
    return Method("fedprox", when, rule)
