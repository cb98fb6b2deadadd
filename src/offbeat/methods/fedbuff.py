"""FedBuff: buffered asynchronous aggregation.

Toghani, Uribe: Unbounded gradients in federated learning with buffered asynchronous aggregation. FL-NeurIPS 2022
(Algorithms 1 and 2). Nguyen et al.: Federated learning with buffered asynchronous aggregation. AISTATS 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, Vector, takes_policy
from offbeat.numerics import local, optimisers
from offbeat.numerics.rates import Rate
from offbeat.numerics.staleness import staleness as law
from offbeat.schedule.buffer import Buffer


@takes_policy(n="buffer_size")
def fedbuff(
    when: Policy = Buffer(10),  # 5, 8; client 3, 10
    client_lr: Rate = 0.02,  # 0.05 swings under the staleness of a hundred clients
    beta: Rate | None = None,
    staleness: str | Mapping[str, Any] = "constant",
    client_options: Mapping[str, Any] | None = None,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """w <- w - beta * (sum of buffer_size deltas, each times s(staleness)); beta None is 1 / buffer_size, the mean.

    Theorem 1 has beta = 1/K and constant weights; Nguyen et al. use s(k) = (1 + k)^-1/2 ("polynomial").
    """
    optimiser = optimisers.server_optimiser(1.0 if beta is None else beta, server_optimiser)
    s = law(staleness)

    def weigh(cohort: Cohort) -> Vector:
        return s(cohort.staleness)  # server 6

    def apply(w: State, sums: Update, cohort: Cohort) -> State:
        total = sums["delta"]
        return optimiser.apply(w, total if beta is not None else total / len(cohort.steps), cohort.version)  # server 9

    steps = local.sgd(client_lr, client_options)  # client 4-9
    return Method("fedbuff", when, Rule(steps, init=optimiser.init, weigh=weigh, apply=apply))
