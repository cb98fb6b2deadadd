"""Gossip SGD: no server; every device keeps its own model and averages it with its neighbours'.

Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017; Koloskova et al.: A unified
theory of decentralized SGD with changing topology and local updates. ICML 2020. It is HL-SGD with one cluster and
tau -> infinity: a commit every local_steps only looks at the mean of the devices' models, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Job, Local, Method, Policy, Rule, State, Update, Vector, takes_policy
from offbeat.numerics import local
from offbeat.numerics.rates import Rate
from offbeat.numerics.weights import shares
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds


@takes_policy()
def gossip_sgd(
    when: Policy = Hybrid(Rounds(10), server=False),
    client_lr: Rate = 0.05,
    client_options: Mapping[str, Any] | None = None,
) -> Method:
    """X <- W (X - lr G), from each device's own model; version = mean of the devices' models after local_steps each.

    A device remembers how far it has moved from version 0. A momentum begins anew after every local_steps, unless
    its state is kept.
    """
    share, sgd = shares("uniform"), local.sgd(client_lr, client_options)

    def begin(server: State, job: Job) -> local.Path:
        path: local.Path = sgd.begin(server | {"model": server["origin"] + server["moved"]}, job)
        return path

    def finish(server: State, path: local.Path, job: Job) -> Update:
        moved = path.y - server["origin"]
        return {"place": moved, "moved": moved, **local.remembered(sgd, server, path, job)}

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return {"model": w["origin"] + mean["place"], "origin": w["origin"]}

    def init(x: Vector) -> State:
        return {"model": x, "origin": x}

    steps = Local(begin, sgd.step, finish, sgd.rates, sends=("place",), remembers=("moved", *sgd.remembers))
    rule = Rule(steps, init=init, weigh=share.of, apply=apply, broadcasts=("model", "origin"))
    return Method("gossip-sgd", when, rule)
