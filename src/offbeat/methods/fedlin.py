"""FedLin: clients first agree on the gradient at the common model, then correct every local step by it.

Mitra, Jaafar, Pappas, Hassani: Linear convergence in federated learning: tackling client heterogeneity and sparse
gradients. NeurIPS 2021 (Algorithm 1, without compression). A round has two exchanges, and so two commits here: even
versions ask for gradients, odd versions for models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.method import Cohort, Job, Local, Method, Policy, Rule, State, Update, covered
from offbeat.numerics import server
from offbeat.numerics.local import descend
from offbeat.numerics.rates import Rate, rate
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.rounds import Rounds


class Path(NamedTuple):
    y: Tensor
    total: Tensor  # of the gradients
    correction: Tensor


def fedlin(
    n: int | None = None,
    local_steps: int | None = None,
    client_lr: Rate = 0.05,
    probes: int = 1,
    weights: Weights = "uniform",
    when: Policy | None = None,
    experimental: bool = False,
) -> Method:
    """Client i takes K_i steps y <- y - (client_lr / K_i) (g_i(y) - g_i(w) + g(w)), g being the mean over clients.

    g_i(w) is the mean of `probes` stochastic gradients at w; where batches are whole shards, one is exact. The same n
    clients (None: all) take part in both halves of a round.
    """
    share, at = shares(weights), rate(client_lr)

    def begin(given: State, job: Job) -> Path:
        x = given["model"]
        return Path(x, torch.zeros_like(x), given["g"] - given["g_i"])

    def step(path: Path, g: Tensor, job: Job) -> Path:
        y = descend(path.y, job.lr / job.steps, g, path.correction)  # with rate 0 it stays where it is
        return path._replace(y=y, total=path.total + g)

    def finish(given: State, path: Path, job: Job) -> Update:
        asked = job.calibration == 0  # for a gradient
        mean = path.total / job.steps
        update = torch.where(asked, mean, given["model"] - path.y)
        return {"update": update, "g_i": torch.where(asked, mean, given["g_i"])}

    def commit(w: State, updates: Update, cohort: Cohort) -> State:
        mean = share.of(cohort) @ updates["update"]
        return w | ({"g": mean} if cohort.version % 2 == 0 else {"model": w["model"] - mean})

    policy = covered("fedlin", Rounds(local_steps, n, probes=probes), when, experimental)
    steps = Local(
        begin,
        step,
        finish,
        lambda version: at(version // 2) if version % 2 else 0.0,
        ("update",),
        remembers=("g_i",),
        calibration=lambda version: version % 2,
    )
    return Method(
        "fedlin", policy, Rule(steps, commit, server.beside("g"), ("model", "g"), clients=share.clients, down=1)
    )
