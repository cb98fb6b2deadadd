"""FedLin: clients first agree on the gradient at the common model, then correct every local step by it.

Mitra, Jaafar, Pappas, Hassani: Linear convergence in federated learning: tackling client heterogeneity and sparse
gradients. NeurIPS 2021 (Algorithm 1, without compression). A round has two exchanges, and so two commits here: even
versions ask for gradients, odd versions for models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.method import Cohort, Job, Local, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import optimisers
from offbeat.numerics.local import descend
from offbeat.numerics.rates import Rate, client_rate, every
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.rounds import Rounds


class Path(NamedTuple):
    y: Tensor
    total: Tensor  # of the gradients
    correction: Tensor


@takes_policy()
def fedlin(
    when: Policy = Rounds(probes=1),
    client_lr: Rate = 0.05,
    weights: Weights = "uniform",
) -> Method:
    """Client i takes K_i steps y <- y - (client_lr / K_i) (g_i(y) - g_i(w) + g(w)), g being the mean over clients.

    g_i(w) is the mean of `probes` stochastic gradients at w; where batches are whole shards, one is exact. The same n
    clients (None: all) take part in both halves of a round.
    """
    if getattr(when, "probes", None) is None:
        raise ConfigError(
            [
                "fedlin: in a round the same clients send gradients and then take steps, but `when` has no probes; set "
                "the number of gradients, as in when = {policy = 'rounds', size = 2, probes = 1}"
            ]
        )
    share = shares(weights)

    def begin(given: State, job: Job) -> Path:
        x = given["model"]
        return Path(x, torch.zeros_like(x), given["g"] - given["g_i"])

    def probing(job: Job) -> Tensor:
        return job.version % 2 == 0  # for a gradient at the model

    def step(path: Path, g: Tensor, job: Job) -> Path:
        lr = torch.where(probing(job), 0.0, job.lr / job.steps)  # who is asked for a gradient stays where it is
        return path._replace(y=descend(path.y, lr, g, path.correction), total=path.total + g)

    def finish(given: State, path: Path, job: Job) -> Update:
        mean = path.total / job.steps
        update = torch.where(probing(job), mean, given["model"] - path.y)
        return {"update": update, "g_i": torch.where(probing(job), mean, given["g_i"])}

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        update = mean["update"]
        return w | ({"g": update} if cohort.version % 2 == 0 else {"model": w["model"] - update})

    lr = every(2, client_rate(client_lr))  # by rounds
    rule = Rule(
        Local(begin, step, finish, {"lr": lr}, ("update",), remembers=("g_i",)),
        init=optimisers.beside("g"), weigh=share.of, apply=apply, broadcasts=("model", "g"), clients=share.clients,
        travels=lambda cohort: (1, 1),  # the model in one half, g in the other
    )  # fmt: skip
    return Method("fedlin", when, rule)
