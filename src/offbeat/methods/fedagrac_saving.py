"""FedaGrac with less to send: only first gradients travel, and the server works out the means (section 4.2).

A wrapper around the rule of `fedagrac`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.method import Cohort, Policy, Rule, State, StepRate, Update


def mean_gradient(travelled: Tensor, reach: Tensor, c: Tensor) -> Tensor:
    return travelled / reach - c  # because each step moved by lr (g + c), and `reach` is the sum of lr


def saved(rule: Rule, policy: Policy, sends_first: Callable[[Cohort], Tensor]) -> Rule:
    """The rule of which only first gradients are sent: the server works out the means, as it keeps each nu_i."""
    lr, lam = rule.local.rates["lr"], rule.local.rates["calibration"]
    if policy.drops or not policy.synchronous:
        raise ConfigError(["saving needs rounds that wait for all their updates; leave out `when`"])
    if isinstance(lr, StepRate) or isinstance(lam, StepRate):
        raise ConfigError(["saving needs a client_lr that is the same at all local steps; give one by version"])

    def commit(w: State, updates: Update, cohort: Cohort) -> State:
        c = lam(cohort.version) * (w["nu"] - updates["kept nu_i"])
        mean = mean_gradient(updates["delta"], lr(cohort.version) * cohort.steps[:, None], c)
        return rule.renew(w, updates | {"mean": mean}, cohort) | {"kept nu_i": mean}

    return replace(
        rule, local=replace(rule.local, sends=("delta", "first")), weigh=None, apply=None, commit=commit,
        keeps=("kept nu_i", *rule.keeps), lossless=True, reliable="saving",
        travels=lambda cohort: (2, 1 + sends_first(cohort).double()),
    )  # fmt: skip
