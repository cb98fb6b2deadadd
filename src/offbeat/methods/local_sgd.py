"""Local SGD, which is generalised FedAvg: local steps, then a mean with a rate of its own (two-sided rates).

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-efficient learning of deep networks from decentralized
data. AISTATS 2017 (Algorithm 1: server_lr = 1, weights = "size").
Yang, Fang, Liu: Achieving linear speedup with partial worker participation in non-IID federated learning. ICLR 2021
(Algorithm 1); equations (2) and (3) of the DLSGD paper. (3) as printed has the sign of the update reversed: with
delta = start - end, as below, w - eta * mean(delta) is what both papers compute.
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
def local_sgd(
    when: Policy = Rounds(size=10),
    client_lr: Rate = 0.05,
    server_lr: Rate = 1.0,
    weights: Weights = "uniform",
    client_options: Mapping[str, Any] | None = None,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """n sampled clients (None: all) take local_steps from the newest model; w <- w - server_lr * mean(delta)."""
    share, optimiser = shares(weights), optimisers.server_optimiser(server_lr, server_optimiser)

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, mean["delta"], cohort.version)  # (3)

    steps = local.sgd(client_lr, client_options)  # (2)
    rule = Rule(steps, init=optimiser.init, weigh=share.of, apply=apply, clients=share.clients)
    return Method("local-sgd", when, rule)
