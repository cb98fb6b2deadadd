"""FedNova: each client's update is divided by how far its solver went, so that many steps do not mean a larger say.

Wang, Liu, Liang, Joshi, Poor: Tackling the objective inconsistency problem in heterogeneous federated optimization.
NeurIPS 2020 (Algorithm 1 with equation (4); tau_eff = sum p_i |a_i|_1, its default).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.method import Cohort, Job, Local, Method, Policy, Rule, State, Update, Vector, takes_policy
from offbeat.numerics import local, optimisers
from offbeat.numerics.rates import Rate
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.rounds import Rounds


@takes_policy()
def fednova(
    when: Policy = Rounds(),
    client_lr: Rate = 0.05,
    server_lr: Rate = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    proximal: float = 0.0,
    weights: Weights = "size",
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """w <- w - server_lr * tau_eff * sum p_i delta_i / |a_i|_1, with tau_eff = sum p_i |a_i|_1.

    A solver's update is lr * sum_k a_k g_k; |a|_1 is K for SGD, and follows from the solver with `momentum`
    (Nesterov's, if wanted) or a `proximal` pull. A common factor of all |a_i|_1 cancels, so clients say lr |a_i|_1.
    """
    share, optimiser = shares(weights), optimisers.server_optimiser(server_lr, server_optimiser)

    def weigh(cohort: Cohort) -> Vector:
        return share.of(cohort) / cohort.numbers["reach"]

    def apply(w: State, sums: Update, cohort: Cohort) -> State:
        tau = share.of(cohort) @ cohort.numbers["reach"]
        return optimiser.apply(w, tau * sums["delta"], cohort.version)

    options = ({"momentum": momentum} if momentum else {}) | ({"nesterov": True} if nesterov else {})
    steps = measured(local.sgd(client_lr, options, proximal))
    rule = Rule(steps, init=optimiser.init, weigh=weigh, apply=apply, share=share.of, clients=share.clients)
    return Method("fednova", when, rule)


class Both(NamedTuple):
    """A solver's carry, opened, and that of the same solver on one number whose gradient is always one."""

    y: Tensor
    rest: tuple[Any, ...]
    unit: local.Path


def measured(solver: Local) -> Local:
    """The solver, which also says lr |a|_1: how far it goes where every gradient is one."""

    def begin(server: State, job: Job) -> Both:
        path = solver.begin(server, job)
        return Both(path[0], tuple(path[1:]), solver.begin({"model": torch.zeros_like(job.lr)[None]}, job))

    def step(both: Both, g: Tensor, job: Job) -> Both:
        path = solver.step(local.Path(both.y, *both.rest), g, job)
        return Both(path[0], tuple(path[1:]), solver.step(both.unit, torch.ones_like(both.unit.y), job))

    def finish(server: State, both: Both, job: Job) -> Update:
        return {"delta": server["model"] - both.y, "reach": -both.unit.y[0]}

    return replace(solver, begin=begin, step=step, finish=finish, numbers=("reach",))
