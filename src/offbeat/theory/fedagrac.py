"""The theorems of FedaGrac (Wu et al.): what unequal numbers of local steps cost FedAvg, and what calibration mends.

Letters as in the paper: M clients with weights omega_i, K_i local steps, K their weighted mean, T commits, rate eta,
calibration lambda, x_* the optimum. The papers' rates are orders; where a proof carries constants to its last line,
they are kept. Theorems 1 and 3 end in Lemma 1 of SCAFFOLD, which bounds the mean of F(x_t) - F(x_*) over t < T with
weights (1 - a)^-(t+1), a the contraction of a commit: that mean is what is bounded here, not the last model alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from offbeat.errors import ConfigError
from offbeat.theory.constants import Advice, Condition, Constants, Plan

POSITIVE = math.ulp(0.0)  # the least number above zero: "> 0" as a condition ">="
GAP = "mean of E F(x_t) - F(x_*) over t < T, weights (1 - a)^-(t+1), a = {} eta mu K"


class Steps(NamedTuple):
    """The K_i of the clients and their weights omega_i."""

    counts: tuple[int, ...]
    weights: tuple[float, ...]

    def sum(self, k: int, w: int = 1) -> float:
        """sum_i omega_i^w K_i^k"""
        return sum(omega**w * float(count) ** k for count, omega in zip(*self, strict=True))

    @property
    def mean(self) -> float:
        return self.sum(1)


def known(constants: Constants, *names: str) -> tuple[float, ...]:
    """The constants of these names, or one sentence that names all that are missing; L and mu must be above zero."""
    values = {name: getattr(constants, name) for name in names}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ConfigError([f"FedaGrac's theorem needs {', '.join(missing)}: give or measure what is missing"])
    flat = [name for name in ("smoothness", "convexity") if values.get(name, 1) <= 0]
    if flat:
        raise ConfigError([f"{', '.join(flat)}: must be above zero"])
    return tuple(float(value) for value in values.values())


def steps_of(constants: Constants, plan: Plan, weights: Sequence[float] | None) -> Steps:
    """The steps of a plan (equal ones if it names none; equal weights if None), or every problem at once."""
    counts = plan.steps or (plan.local_steps,) * constants.clients
    omega = (1 / constants.clients,) * constants.clients if weights is None else tuple(weights)
    wrong = {
        f"{len(counts)} steps and {len(omega)} weights for {constants.clients} clients: give one each": (
            not len(counts) == len(omega) == constants.clients
        ),
        f"steps {counts}: every client takes at least one": min(counts, default=0) < 1,
        f"weights {omega}: none below zero, and they add up to one": (
            min(omega, default=0) < 0 or abs(sum(omega) - 1) > 1e-6
        ),
        f"commits = {plan.commits}: at least one": plan.commits < 1,
        f"client_lr = {plan.client_lr}: above zero, or None": plan.client_lr is not None and plan.client_lr <= 0,
    }
    if any(wrong.values()):
        raise ConfigError(text for text, so in wrong.items() if so)
    return Steps(counts, omega)


def decay(a: float, commits: int) -> float:
    """1 / sum_{t<T} (1 - a)^-(t+1) = a / ((1 - a)^-T - 1): the weight left on the start; 1/T at a = 0, 0 from a = 1."""
    if a <= 0:
        return 1 / commits
    exponent = -commits * math.log1p(-a) if a < 1 else math.inf
    return a / math.expm1(exponent) if exponent < 700 else 0.0


def tuned(largest: float, rate: float, commits: int, distance: float, noise: float) -> float:
    """eta of Lemma 1 of SCAFFOLD for d_{t+1} <= (1 - m eta) d_t - ... + c eta^2: ln(max(2, m^2 T d_0 / c)) / (m T).

    Never above `largest`. The paper writes eta = O(1 / (mu L T K)), whose L is out of place and whose missing logarithm
    would leave the start unforgotten; its proofs cite the lemma.
    """
    if noise == 0:
        return largest
    return min(largest, math.log(max(2.0, rate**2 * commits * distance / noise)) / (rate * commits))


def inconsistency(steps: Steps, at_optimum: Sequence[float], part: float = 0.0) -> float:
    """(3): sum_i omega_i (K_i / K_min - 1) F_i(x_*); with a part s `lost`, K_min is (1 - s) K_min."""
    least = (1 - part) * min(steps.counts)
    return sum(w * (k / least - 1) * f for k, w, f in zip(*steps, at_optimum, strict=True))


def lost(lr: float, smoothness: float, most: int) -> float:
    """s = 2u + 16u^2 + 16u^3, u = eta L K_max: the part of the descent that the squared gradients of appendix A undo.

    The proof drops those terms without a word. We keep them: F_i >= 0 and smooth, so |grad F_i|^2 <= 2 L F_i.
    """
    u = lr * smoothness * most
    return 2 * u + 16 * u**2 + 16 * u**3


def bound1(c: Constants, steps: Steps, at_optimum: Sequence[float], distance: float, lr: float, commits: int) -> float:
    """Appendix A summed up: (d_0 decay / 2 eta + n / 2 eta) / ((1 - s) K_min) + the inconsistency with s lost.

    n = sigma^2 (eta^2 sum omega^2 K + 8 eta^3 L sum omega K^2 + 8 eta^4 L^2 sum omega K^3), a = eta mu K / 2. The proof
    takes noise and later gradients of a client as uncorrelated (12). Infinite where s >= 1.
    """
    big, mu, sigma = known(c, "smoothness", "convexity", "noise")
    s = lost(lr, big, max(steps.counts))
    if s >= 1:
        return math.inf
    noise = sigma * (lr * steps.sum(1, 2) + 8 * lr**2 * big * steps.sum(2) + 8 * lr**3 * big**2 * steps.sum(3))
    start = distance * decay(lr * mu * steps.mean / 2, commits) / lr
    return (start + noise) / (2 * (1 - s) * min(steps.counts)) + inconsistency(steps, at_optimum, s)


def theorem1(
    constants: Constants,
    plan: Plan,
    *,
    at_optimum: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    distance: float | None = None,
) -> Advice:
    """FedAvg on strongly convex F_i >= 0: as T grows, F(x_T) - F(x_*) <= O(sum omega_i (K_i/K_min - 1) F_i(x_*)) (3).

    `at_optimum` holds the F_i(x_*); `distance` is |x_0 - x_*|^2, 2 gap / mu where not given. The bound is `bound1`,
    which tends to (3) with constant one; eta is `tuned`, with 4 L K_max sum omega_i K_i F_i(x_*) among the noise, so
    that it falls with T as the theorem asks. B of Assumption 4 does not enter.
    """
    big, mu, sigma, *gap = known(constants, "smoothness", "convexity", "noise", *(["gap"] if distance is None else []))
    steps = steps_of(constants, plan, weights)
    if at_optimum is None or len(at_optimum) != constants.clients or min(at_optimum) < 0:
        raise ConfigError([f"theorem 1 needs at_optimum, the F_i(x_*) >= 0 of all {constants.clients} clients"])
    most, start = max(steps.counts), 2 * gap[0] / mu if distance is None else distance
    drift = 1 / (big * math.sqrt(2 * most * (most - 1))) if most > 1 else math.inf
    bias = 4 * big * most * sum(w * k * f for k, w, f in zip(*steps, at_optimum, strict=True))
    noise = sigma * steps.sum(1, 2) + bias
    cap = min(1 / (big * steps.mean), drift, 1 / (9 * big * most))
    lr = plan.client_lr or tuned(cap, mu * steps.mean / 2, plan.commits, start, noise)
    conditions = (
        Condition("Theorem 1", "eta <= 1 / (L K)", lr, 1 / (big * steps.mean)),
        Condition("(17)", "eta <= 1 / (L sqrt(2 K_max (K_max - 1)))", lr, drift),
        Condition("appendix A", "2u + 16u^2 + 16u^3 <= 1/2, u = eta L K_max", lost(lr, big, most), 0.5),
    )
    bound = bound1(constants, steps, at_optimum, start, lr, plan.commits)
    note = f"as T grows the bound tends to {inconsistency(steps, at_optimum):g}, the inconsistency (3)"
    return advice("Theorem 1", plan, lr, bound, GAP.format("1/2"), conditions, note)


def descent(steps: Steps, dissimilarity: float, calibration: float) -> float:
    """lambda K / 2 + (1 - lambda) (K_max - (K_max - K) B^2) / 2: what eta |grad F|^2 is multiplied by in appendix B."""
    most = max(steps.counts)
    return (calibration * steps.mean + (1 - calibration) * (most - (most - steps.mean) * dissimilarity)) / 2


def least_calibration(steps: Steps, dissimilarity: float) -> float:
    """The lambda above which `descent` is positive: 0 while B^2 <= K_max / (K_max - K); below one always."""
    most = max(steps.counts)
    excess = (most - steps.mean) * dissimilarity - most
    return excess / (excess + steps.mean) if excess > 0 else 0.0


def order2(c: Constants, steps: Steps, lr: float, calibration: float, commits: int) -> float:
    """The five terms of (6) with eta as it stands, sqrt(M / T K) in the paper; constants are left out.

    gap / (eta lambda K T)
    + eta sigma^2 L [sum omega^2 K_i / (lambda K) + lambda sum omega^2 ((K - K_i)^2 / (K K_i) + 1)]
    + (eta L sigma)^2 / K [sum omega K_i^4 / lambda + lambda (sum omega K_i^4 sum omega^2 / K_j + sum omega K_i^3)].
    """
    if calibration <= 0:
        return math.inf
    gap, big, sigma = known(c, "gap", "smoothness", "noise")
    k, lam = steps.mean, calibration
    uneven = k * steps.sum(-1, 2) - steps.sum(0, 2) + steps.sum(1, 2) / k  # sum omega^2 ((K - K_i)^2 / (K K_i) + 1)
    first = lr * sigma * big * (steps.sum(1, 2) / (lam * k) + lam * uneven)
    fourth = steps.sum(4) / lam + lam * (steps.sum(4) * steps.sum(-1, 2) + steps.sum(3))
    return gap / (lr * lam * k * commits) + first + lr**2 * big**2 * sigma * fourth / k


def theorem2(constants: Constants, plan: Plan, *, weights: Sequence[float] | None = None) -> Advice:
    """FedaGrac on smooth F_i: the mean of E |grad F(x_t)|^2 is of order (6), O(1 / sqrt(M T K)) at equal weights.

    eta = sqrt(M / (T K)), its O(.) read as one, and never above 1 / (2 sqrt(2) L K_max) of (30); lambda is 1 where not
    given. No bound: the proof's p_1 and p_2 are only o(.), and its eta "sufficiently small".
    """
    _, big, _, squared = known(constants, "gap", "smoothness", "noise", "dissimilarity")
    steps = steps_of(constants, plan, weights)
    lam = 1.0 if plan.calibration is None else plan.calibration
    cap = 1 / (2 * math.sqrt(2) * big * max(steps.counts))
    lr = plan.client_lr or min(cap, math.sqrt(constants.clients / (plan.commits * steps.mean)))
    conditions = (
        Condition("(30)", "eta <= 1 / (2 sqrt(2) L K_max)", lr, cap),
        Condition("lambda", "lambda > 0", lam, POSITIVE, least=True),
        Condition("(23)", "lambda <= 1", lam, 1.0),
        Condition("(22)", "lambda K + (1 - lambda) (K_max - (K_max - K) B^2) > 0",
                  2 * descent(steps, squared, lam), POSITIVE, least=True),
    )  # fmt: skip
    order = order2(constants, steps, lr, lam, plan.commits)
    notes = (
        f"of the order of {order:g}, constants left out",
        f"(22) asks lambda > {least_calibration(steps, squared):g}",
    )
    return advice("Theorem 2", plan, lr, None, "mean of E |grad F(x_t)|^2 over t < T", conditions, *notes)


def variance3(steps: Steps) -> float:
    """sum omega^2 K_i + sum omega^2 (K/K_i - 1)^2 K_i + 4 sum_{K_i > K} omega^2 K^2 / K_i: the noise of appendix C."""
    k = steps.mean
    uneven = k**2 * steps.sum(-1, 2) - 2 * k * steps.sum(0, 2) + steps.sum(1, 2)
    return steps.sum(1, 2) + uneven + 4 * sum(w**2 * k**2 / count for count, w in zip(*steps, strict=True) if count > k)


def bound3(c: Constants, steps: Steps, distance: float, lr: float, commits: int) -> float:
    """Appendix C summed up: d_0 decay / (2 eta K) + 3 eta sigma^2 `variance3` / K, a = eta mu K / 4."""
    (mu, sigma), k = known(c, "convexity", "noise"), steps.mean
    return distance * decay(lr * mu * k / 4, commits) / (2 * lr * k) + 3 * lr * sigma * variance3(steps) / k


def order3(c: Constants, steps: Steps, distance: float, commits: int) -> float:
    """(8): mu d_0 exp(-mu T / L) + H / (mu T) + P / (mu T)^2; constants and logarithms are left out.

    H = sigma^2 / K^2 sum omega^2 (K_i + K + (K - K_i)^2 / K_i), P = L^2 sigma^2 / mu sum omega K_i^3 sum omega^2 / K_j.
    """
    (big, mu, sigma), k = known(c, "smoothness", "convexity", "noise"), steps.mean
    spread = sigma / k**2 * (2 * steps.sum(1, 2) - k * steps.sum(0, 2) + k**2 * steps.sum(-1, 2))
    third = big**2 * sigma / mu * steps.sum(3) * steps.sum(-1, 2)
    return mu * distance * math.exp(-mu * commits / big) + spread / (mu * commits) + third / (mu * commits) ** 2


def theorem3(
    constants: Constants, plan: Plan, *, weights: Sequence[float] | None = None, distance: float | None = None
) -> Advice:
    """FedaGrac with lambda = 1 on strongly convex F_i: to the optimum, at the order (8); the bound is `bound3`.

    `distance` is |x_0 - x_*|^2, 2 gap / mu where not given; eta is `tuned` (m = mu K / 4, c = 6 sigma^2 `variance3`).
    The proof asks eta small enough for its u_1 and u_2 without saying how small; we ask 1 / (L K) of the theorem and
    (30) of the drift bound it uses. |x_{t,k} - x_*| in Q_1 and Q_2 is read as |x_{t,k} - x_t|.
    """
    big, mu, sigma, *gap = known(constants, "smoothness", "convexity", "noise", *(["gap"] if distance is None else []))
    steps = steps_of(constants, plan, weights)
    start, lam = 2 * gap[0] / mu if distance is None else distance, plan.calibration
    caps = 1 / (big * steps.mean), 1 / (2 * math.sqrt(2) * big * max(steps.counts))
    noise = 6 * sigma * variance3(steps)
    lr = plan.client_lr or tuned(min(caps), mu * steps.mean / 4, plan.commits, start, noise)
    conditions = (
        Condition("Theorem 3", "eta <= 1 / (L K)", lr, caps[0]),
        Condition("(30)", "eta <= 1 / (2 sqrt(2) L K_max)", lr, caps[1]),
        Condition("lambda", "|lambda - 1| <= 0", abs((1.0 if lam is None else lam) - 1), 0.0),
    )
    bound = bound3(constants, steps, start, lr, plan.commits)
    note = "the proof asks eta small enough besides, without saying how small"
    return advice("Theorem 3", plan, lr, bound, GAP.format("1/4"), conditions, note)


def advice(
    name: str, plan: Plan, lr: float, bound: float | None, bounded: str, conditions: tuple[Condition, ...], *notes: str
) -> Advice:
    """The server takes the weighted mean as it is: a plan with another server_lr is no FedaGrac."""
    if plan.server_lr is not None:
        conditions += (Condition("server_lr", "|server_lr - 1| <= 0", abs(plan.server_lr - 1), 0.0),)
    return Advice(f"FedaGrac, {name}", lr, 1.0, bound, bounded, conditions, notes=notes)
