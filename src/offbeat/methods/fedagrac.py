"""FedaGrac: local steps calibrated towards a predicted global direction, where clients take different numbers of them.

Wu, Guo, Wang, Zhang, Qu, Zhang, Liu: From deterioration to acceleration: a calibration approach to rehabilitating step
asynchronism in federated optimization (Algorithm 1, section 4.2). Line 11 and equation (4) of the paper differ in what
a fast client keeps as nu_i: the mean of its gradients (`reference = "mean"`, as its proofs have it) or its first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.method import Cohort, Job, Local, Method, Policy, Rule, State, Update, covered
from offbeat.numerics import reference as refs
from offbeat.numerics.local import Corrected, corrected_step
from offbeat.numerics.rates import Rate, rate
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.rounds import Rounds

TRANSITS: dict[str, Callable[[Tensor], Tensor]] = {  # who sends its first gradient, by who is fast
    "by-steps": torch.clone, "mean": torch.zeros_like, "first": torch.ones_like, "reverse": torch.logical_not,
}  # fmt: skip


def fedagrac(
    n: int | None = None,
    local_steps: int | None = None,
    client_lr: Rate = 0.05,
    calibration: Rate = 1.0,
    transit: Literal["by-steps", "mean", "first", "reverse"] = "by-steps",
    first: Literal["gradient", "epoch"] = "gradient",
    reference: Literal["mean", "equation-4"] = "mean",
    start: Literal["gradients", "zeros"] = "gradients",
    saving: bool = False,
    weights: Weights = "size",
    when: Policy | None = None,
    experimental: bool = False,
) -> Method:
    """Every local step follows g + lambda (nu - nu_i), lambda being `calibration` (by version, if it has a schedule).

    nu is the weighted mean of one gradient from each client; `transit` says which: of clients with more steps than the
    mean the first, of the others the mean over their steps ("by-steps"); from everyone the "mean" or the "first"; or
    the "reverse". `first` is the first stochastic gradient, or the mean over the first "epoch". `reference` is what a
    client keeps as nu_i: the "mean" (line 11), or by "equation-4" a client with more steps than the mean its first.
    With `saving` only first gradients are sent, the server works out the means (section 4.2). With n sampled clients
    the server keeps what each one sent last, and nu stays the mean over all.
    """
    share, lr, lam = shares(weights), rate(client_lr), rate(calibration, "calibration", zero=True)

    def begin(given: State, job: Job) -> Corrected:
        x = given["model"]  # 3-4
        return Corrected(x, job.calibration * (given["nu"] - refs.kept(given)), x)  # 5

    def finish(given: State, path: Corrected, job: Job) -> Update:
        x = given["model"]
        count = torch.minimum(job.epoch, job.steps) if first == "epoch" else torch.ones_like(job.steps)
        mean = refs.mean_gradient(x - path.y, job.steps, job.lr, path.c)  # 11
        early = refs.mean_gradient(x - path.early, count, job.lr, path.c)
        return {"delta": x - path.y, "first": early, "mean": mean, **refs.own(reference, mean, early, job.steps)}

    def sends_first(cohort: Cohort) -> Tensor:
        steps = cohort.steps.double()
        return TRANSITS[transit](steps > share.of(cohort).double() @ steps * (1 + 1e-6))  # 14, 21

    def commit(w: State, updates: Update, cohort: Cohort) -> State:
        mean, kept = share.of(cohort), {}
        if saving:
            c = lam(cohort.version) * (w["nu"] - updates["kept nu_i"])
            kept["kept nu_i"] = refs.mean_gradient(updates["delta"], cohort.steps[:, None], lr(cohort.version), c)
            updates["mean"] = kept["kept nu_i"]
        sent = torch.where(sends_first(cohort)[:, None], updates["first"], updates["mean"])
        nu = mean @ sent  # 23
        if not everyone:
            nu = w["nu"] + share.part(cohort) * (mean @ (sent - updates["kept sent"]))
            kept["kept sent"] = sent
        told = refs.told(reference, nu, mean, cohort.steps)
        return {"model": w["model"] - mean @ updates["delta"], **told, **kept}  # 20

    policy = covered("fedagrac", Rounds(local_steps, n), when, experimental)
    everyone = policy == Rounds(getattr(policy, "steps", None))
    if saving and policy != Rounds(getattr(policy, "steps", None), getattr(policy, "size", None)):
        raise ConfigError(["saving needs rounds that wait for all their updates; leave out `when`"])
    refs.require(reference, everyone and not saving)
    sends = ("delta", "first") if saving else ("delta", "first", "mean")
    steps = Local(begin, corrected_step, finish, lr, sends, remembers=refs.REMEMBERS[reference], calibration=lam,
                  mark=lambda path, job: path._replace(early=path.y),
                  pause="epoch" if first == "epoch" else "first")  # fmt: skip
    rule = Rule(
        steps, commit, refs.init(reference), refs.broadcasts(reference), share=share.of, clients=share.clients,
        keeps=("kept nu_i",) * saving + ("kept sent",) * (not everyone), lossless=saving, down=2, up=2,
        prime=(lambda w, mean: w | {"nu": mean}) if start == "gradients" else None,
        uplink=(lambda cohort: 1 + sends_first(cohort).double()) if saving else None,
    )  # fmt: skip
    return Method("fedagrac", policy, rule)
