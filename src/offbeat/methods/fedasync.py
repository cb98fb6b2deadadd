"""FedAsync: every arrival is mixed into the model, the less the staler it is.

Xie, Koyejo, Gupta: Asynchronous federated optimization. arXiv:1903.03934, 2019 (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offbeat.errors import ConfigError
from offbeat.method import Carry, Cohort, Job, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import local
from offbeat.numerics.rates import Rate
from offbeat.numerics.staleness import staleness as law
from offbeat.schedule.buffer import Buffer


@takes_policy(n=None)
def fedasync(
    when: Policy = Buffer(1),
    alpha: float = 0.6,
    client_lr: Rate = 0.05,
    proximal: float = 0.0,
    staleness: str | Mapping[str, Any] = "polynomial",
    client_options: Mapping[str, Any] | None = None,
) -> Method:
    """w <- (1 - a) w + a y for each client model y that arrives, with a = alpha * s(staleness).

    The paper's box trains on f + rho/2 |y - w|^2: that is `proximal` = rho.
    """
    if not 0 < alpha <= 1:
        raise ConfigError([f"alpha = {alpha}; the mixing weight must lie in (0, 1]"])
    s = law(staleness)
    sgd = local.sgd(client_lr, client_options, proximal)  # worker: y <- y - lr grad g(y; z)

    def finish(server: State, carry: Carry, job: Job) -> Update:
        return {"model": carry.y, **local.remembered(sgd, server, carry, job)}  # worker: push (y, tau)

    def commit(w: State, updates: Update, cohort: Cohort) -> State:
        a = alpha * s(cohort.staleness)  # updater: alpha_t <- alpha * s(t - tau)
        model = w["model"]
        for weight, y in zip(a, updates["model"], strict=True):
            model = (1 - weight) * model + weight * y  # updater: x_t <- (1 - alpha_t) x_{t-1} + alpha_t x_new
        return w | {"model": model}

    steps = replace(sgd, finish=finish, sends=("model",))
    return Method("fedasync", when, Rule(steps, init=lambda x: {"model": x}, commit=commit))
