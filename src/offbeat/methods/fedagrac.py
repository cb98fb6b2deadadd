"""FedaGrac: local steps calibrated towards a predicted global direction, where clients take different numbers of them.

Wu, Guo, Wang, Zhang, Qu, Zhang, Liu: From deterioration to acceleration: a calibration approach to rehabilitating step
asynchronism in federated optimization (Algorithm 1, section 4.2). Line 11 and equation (4) of the paper differ in what
a fast client keeps as nu_i: the mean of its gradients (`reference = "mean"`, as its proofs have it) or its first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from offbeat.method import Cohort, Job, Local, Method, Policy, Rule, State, Update, takes_policy
from offbeat.methods.fedagrac_saving import mean_gradient, saved
from offbeat.numerics import reference as refs
from offbeat.numerics.local import descend
from offbeat.numerics.rates import Rate, client_rate, rate
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.rounds import Rounds

TRANSITS: dict[str, Callable[[Tensor], Tensor]] = {  # who sends its first gradient, by who is fast
    "by-steps": torch.clone, "mean": torch.zeros_like, "first": torch.ones_like, "reverse": torch.logical_not,
}  # fmt: skip


@takes_policy()
def fedagrac(
    when: Policy = Rounds(),
    client_lr: Rate = 0.05,
    calibration: Rate = 1.0,
    transit: Literal["by-steps", "mean", "first", "reverse"] = "by-steps",
    first: Literal["gradient", "epoch"] = "gradient",
    reference: Literal["mean", "equation-4"] = "mean",
    start: Literal["gradients", "zeros"] = "gradients",
    saving: bool = False,
    weights: Weights = "size",
) -> Method:
    """Every local step follows g + lambda (nu - nu_i), lambda being `calibration` (by version, if it has a schedule).

    nu is the weighted mean of one gradient from each client; `transit` says which: of clients with more steps than the
    mean the first, of the others the mean over their steps ("by-steps"); from everyone the "mean" or the "first"; or
    the "reverse". `first` is the first stochastic gradient, or the mean over the first "epoch". `reference` is what a
    client keeps as nu_i: the "mean" (line 11), or by "equation-4" a client with more steps than the mean its first.
    With `saving` only first gradients are sent, the server works out the means (section 4.2). The server
    keeps what each client sent last, so nu stays the mean over all clients, whoever takes part in a round.
    """
    share, lr, lam = shares(weights), client_rate(client_lr), rate(calibration, "calibration", zero=True)

    def begin(given: State, job: Job) -> Path:
        x = given["model"]  # 3-4
        return Path(x, job.rates["calibration"] * (given["nu"] - refs.nu_i(given)), x, torch.zeros_like(job.lr))  # 5

    def step(path: Path, g: Tensor, job: Job) -> Path:
        y = descend(path.y, job.lr, g, path.c)  # 9
        early = job.step < (job.epoch if first == "epoch" else 1)
        return Path(y, path.c, torch.where(early, y, path.early), path.reach + torch.where(early, job.lr, 0.0))

    def finish(given: State, path: Path, job: Job) -> Update:
        x = given["model"]
        mean = mean_gradient(x - path.y, job.lr * job.steps, path.c)  # 11
        early = mean_gradient(x - path.early, path.reach, path.c)
        return {"delta": x - path.y, "first": early, "mean": mean, **refs.own(reference, mean, early, job.steps)}

    def sends_first(cohort: Cohort) -> Tensor:
        steps = cohort.steps.double()
        return TRANSITS[transit](steps > share.of(cohort).double() @ steps * (1 + 1e-6))  # 14, 21

    def commit(w: State, updates: Update, cohort: Cohort) -> State:
        p, sent = share.of(cohort), torch.where(sends_first(cohort)[:, None], updates["first"], updates["mean"])
        nu = w["nu"] + share.once(cohort) @ (sent - updates["kept sent"])  # 23
        beside = refs.beside_model(reference, nu, p, cohort.steps)
        return {"model": w["model"] - p @ updates["delta"], **beside, "kept sent": sent}  # 20

    refs.require(reference, when.cohort is None and not when.drops and not saving)
    rule = Rule(
        Local(begin, step, finish, {"lr": lr, "calibration": lam}, ("delta", "first", "mean"),
              remembers=refs.REMEMBERS[reference]), init=refs.init(reference), broadcasts=refs.broadcasts(reference),
        commit=commit, keeps=("kept sent",), reliable=refs.RELIABLE[reference], share=share.of,
        clients=share.clients, travels=lambda cohort: (2, 2),
        prime=(lambda w, mean: w | {"nu": mean}) if start == "gradients" else None,
    )  # fmt: skip
    return Method("fedagrac", when, saved(rule, when, sends_first) if saving else rule)


class Path(NamedTuple):
    y: Tensor
    c: Tensor
    early: Tensor  # the iterate after the first step, or the first epoch
    reach: Tensor  # the sum of the rates until then
