"""FedBuff's theorem: its rates, its bound, and the T it asks for.

Toghani, Uribe: Unbounded gradients in federated learning with buffered asynchronous aggregation. FL-NeurIPS 2022
(Theorem 1, Appendix A). Letters: eta client rate, beta server rate (of the sum), Q local steps, K updates in a commit,
T commits, tau staleness, D = f(w_0) - f*. `noise` is sigma-hat^2 = sigma^2 / b, `mean_divergence` gamma^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from offbeat.theory.constants import Advice, Condition, Constants, Plan, Rates, known, over, rates_of

MEAN = "mean of E |grad f(w_t)|^2 over t < T"


def own_rates(constants: Constants, plan: Plan) -> Rates:
    """eta = 1 / (Q sqrt(L T)), beta = 1 / K: the choice of Theorem 1."""
    (smoothness,) = known(constants, plan, "smoothness")
    return Rates(1 / (plan.local_steps * math.sqrt(smoothness * plan.commits)), 1 / plan.cohort)


def needed_commits(constants: Constants, plan: Plan) -> float:
    """T >= 160 L (Q + 7) (tau + 1)^3 (Theorem 1)."""
    (smoothness,) = known(constants, plan, "smoothness")
    return 160 * smoothness * (plan.local_steps + 7) * (plan.staleness + 1) ** 3


def largest_rate(constants: Constants, plan: Plan) -> float:
    """(58): eta <= 1 / (4 L (Q + 1))."""
    (smoothness,) = known(constants, plan, "smoothness")
    return 1 / (4 * smoothness * (plan.local_steps + 1))


def divergence(constants: Constants, plan: Plan) -> float:
    """n gamma^2, or zeta^2 where it is known and smaller: what (79) makes of one client's divergence (Remark 2)."""
    (mean,) = known(constants, plan, "mean_divergence")
    most = [] if constants.divergence is None else known(constants, plan, "divergence")
    return min([constants.clients * mean, *most])


def bound(constants: Constants, plan: Plan) -> float:
    """sqrt(L / T) (8 D + 16 (sigma^2 + gamma^2)) + 320 L (Q + 1) (tau^2 + 1) (sigma^2 + n gamma^2) / T: Theorem 1.

    At the theorem's own rates only; n gamma^2 as `divergence` has it.
    """
    gap, smoothness, noise, gamma = known(constants, plan, "gap", "smoothness", "noise", "mean_divergence")
    late = 320 * smoothness * (plan.local_steps + 1) * (plan.staleness**2 + 1) / plan.commits
    first = math.sqrt(smoothness / plan.commits) * (8 * gap + 16 * (noise + gamma))
    return first + late * (noise + divergence(constants, plan))


def losses(constants: Constants, plan: Plan, rates: Rates) -> tuple[float, float, float]:
    """4 eta beta K L Q, L^2 (tau^2 + 1) c phi and L^2 tau (tau + 1)^2 c phi, each at most 1/4 by (105).

    c = 1 + 4 eta beta K L and phi = 8 eta^2 Q^2 (1 + 2 Q) (1 + beta^2 K^2).
    """
    (smoothness,) = known(constants, plan, "smoothness")
    steps, late, mean = plan.local_steps, plan.staleness, rates.server * plan.cohort
    step = 4 * rates.client * mean * smoothness
    phi = 8 * (rates.client * steps) ** 2 * (1 + 2 * steps) * (1 + mean**2)
    once = smoothness**2 * (1 + step) * phi
    return step * steps, once * (late**2 + 1), once * late * (late + 1) ** 2


def any_bound(constants: Constants, plan: Plan, rates: Rates) -> float:
    """(101)-(104), for other rates too: what Theorem 1 rounds up. With a, b, c the `losses` and B = eta beta K Q,
    (2 D / (B T) + 4 B L (sigma^2 + gamma^2) + 2 b (sigma^2 + n gamma^2)) / (1 - a - b - c); infinite if that is not
    above 0. (102) prints 2 D / B: the division by T is lost.
    """
    gap, smoothness, noise, gamma = known(constants, plan, "gap", "smoothness", "noise", "mean_divergence")
    a, b, c = losses(constants, plan, rates)
    moved = rates.product * plan.cohort * plan.local_steps
    if a + b + c >= 1:
        return math.inf
    late = 2 * b * (noise + divergence(constants, plan))
    return (over(2 * gap, moved * plan.commits) + 4 * moved * smoothness * (noise + gamma) + late) / (1 - a - b - c)


def theorem1(constants: Constants, plan: Plan) -> Advice:
    """FedBuff with the theorem's rates; those of the plan, where they differ, go by the proof's (58) and (105).

    The theorem also takes for granted that each update is of a client drawn uniformly (Assumption 1).
    """
    known(constants, plan, "gap", "smoothness", "noise", "mean_divergence")
    own = own_rates(constants, plan)
    rates = rates_of(plan, own)
    most = max(losses(constants, plan, rates))
    conditions = [
        Condition("(58)", "eta <= 1 / (4 L (Q + 1))", rates.client, largest_rate(constants, plan)),
        Condition("(105)", "the largest of the three losses <= 1/4", most, 1 / 4),
    ]
    if rates == own:
        needed = needed_commits(constants, plan)
        text = "T >= 160 L (Q + 7) (tau + 1)^3"
        conditions.insert(0, Condition("Theorem 1", text, plan.commits, needed, least=True))
    least = bound(constants, plan) if rates == own else any_bound(constants, plan, rates)
    notes = () if rates == own else ("other rates than Theorem 1 has: its proof, (101)-(104), gives the bound",)
    return Advice("FedBuff, Theorem 1", *rates, least, MEAN, tuple(conditions), notes=notes)


class Analysis(NamedTuple):
    """A line of Table 1: what an analysis covers, and its rate in T and the largest staleness tau."""

    reference: str
    asynchronous: bool
    buffered: bool
    unbounded: bool  # needs no bound on gradients
    rate: Callable[[float, float], float]


def waiting(commits: float, staleness: float) -> float:
    """1 / sqrt(T)"""
    return 1 / math.sqrt(commits)


def delayed(commits: float, staleness: float) -> float:
    """1 / sqrt(T) + tau^2 / T"""
    return 1 / math.sqrt(commits) + staleness**2 / commits


TABLE_1 = {  # smooth, non-convex objectives; constants left out
    "local-sgd": (
        Analysis("Yu et al.", False, True, False, waiting),
        Analysis("Wang et al.", False, True, True, waiting),
    ),
    "fedasync": (Analysis("Xie et al.", True, False, False, delayed),),
    "fedbuff": (
        Analysis("Nguyen et al.", True, True, False, delayed),
        Analysis("this paper", True, True, True, delayed),
    ),
}
