"""Asynchronous HL-SGD: each cluster gossips at its own pace and reports to a buffered server; slow ones delay nobody.

A composition of HL-SGD (Guo et al., ICLR 2022, which leaves device heterogeneity to future work) and FedBuff (Nguyen et
al., AISTATS 2022; Toghani, Uribe, 2022). docs/clusters.md says what their theory covers of it and what it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, Vector, takes_policy
from offbeat.numerics import local, optimisers
from offbeat.numerics.rates import Rate
from offbeat.numerics.staleness import staleness as law
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.hybrid import Hybrid


@takes_policy(n="buffer_size", edge=None)
def async_hl_sgd(
    when: Policy = Hybrid(Buffer(1, 10)),
    client_lr: Rate = 0.05,
    server_lr: Rate = 1.0,
    staleness: str | Mapping[str, Any] = "polynomial",
    client_options: Mapping[str, Any] | None = None,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """w <- w - server_lr * mean over buffer_size reports of s(staleness) (n_k K / N) delta_k.

    The best server_lr is below 1 where few clusters make a commit: with 1 and a buffer of one the server takes on
    the cluster's model.
    """
    optimiser, s = optimisers.server_optimiser(server_lr, server_optimiser), law(staleness)

    def weigh(cohort: Cohort) -> Vector:
        return s(cohort.staleness) * (cohort.devices * (cohort.units / cohort.clients) / len(cohort.steps))

    def apply(w: State, sums: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, sums["delta"], cohort.version)

    rule = Rule(local.sgd(client_lr, client_options), init=optimiser.init, weigh=weigh, apply=apply)
    return Method("async-hl-sgd", when, rule)
