"""The theorems of HL-SGD (Guo et al.): gossip inside clusters, and who of a cluster need report to the server.

Letters as in the paper: N devices in K clusters of n, tau local steps a round, m devices of a cluster that report, R
rounds, rate eta, rho the largest mixing rate of the clusters' graphs, D = min(1 / (1 - rho), tau), eps_L^2 the mean
dissimilarity inside clusters, (alpha, eps_g^2) the one between them. The paper's "universal constants" C_1 and C_2
are never given; read off its appendices C.1 and C.2 they are 82 and 18, and then all the bounds have numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from offbeat.errors import ConfigError
from offbeat.theory.constants import Advice, Condition, Constants, Plan

C1 = 82  # (33): 60 where rho <= 1 - 1/tau; elsewhere rho_L = 4 rho^2 tau and (104 rho^2 + 60) / (1 + rho^2) <= 82
C2 = 18  # (37): 2 C_2 = 12 + 24 by (102); the others need 12, 3 and 2
NEED = ("gap", "smoothness", "noise", "inside", "between", "between_factor", "mixing", "clusters")
BOUNDED = "mean, and so least, of E |grad f(x^{r,s})|^2 over r < R and s < tau, x^{r,s} the mean of all devices"

ORDER = "of the order of {:g}, constants left out"


class Problem(NamedTuple):
    """A problem and a plan in the paper's letters; squares stand squared, but for alpha and rho."""

    gap: float
    L: float
    sigma: float
    eps_L: float
    eps_g: float
    alpha: float
    rho: float
    N: int
    n: int
    m: int
    tau: int
    R: int

    @property
    def D(self) -> float:
        """(3): min{1 / (1 - rho), tau}; tau where rho is one."""
        return self.tau if self.rho >= 1 else min(1 / (1 - self.rho), self.tau)

    @property
    def G(self) -> float:
        """(10): G_p = (n - m) / (m (n - 1)); zero in clusters of one."""
        return (self.n - self.m) / (self.m * (self.n - 1)) if self.n > 1 else 0.0

    @property
    def Gp(self) -> float:
        """(10): G_p' = G_p + 1 / tau^2"""
        return self.G + 1 / self.tau**2


def problem(constants: Constants, plan: Plan) -> Problem:
    """The letters; or one sentence that names all missing constants, or one for each bad value."""
    missing = [name for name in NEED if getattr(constants, name) is None]
    if missing:
        raise ConfigError([f"HL-SGD's theorems need {', '.join(missing)}: give or measure what is missing"])
    gap, smooth, sigma, inside, between, alpha, rho, clusters = (float(getattr(constants, name)) for name in NEED)
    n, tau, m = int(constants.clients // clusters) if clusters >= 1 else 0, plan.local_steps, plan.cohort
    wrong = {
        f"{constants.clients} clients in {clusters:g} clusters: they must be of equal size": (
            n < 1 or n * clusters != constants.clients
        ),
        f"smoothness = {smooth}: above zero": smooth <= 0,
        f"mixing = {rho}: from 0 to 1": not 0 <= rho <= 1,
        f"between_factor = {alpha}: alpha is at least one": alpha < 1,
        f"cohort = {m}: from 1 to the {n} devices of a cluster": not 1 <= m <= max(n, 1),
        f"local_steps = {tau} and commits = {plan.commits}: at least one": min(tau, plan.commits) < 1,
        f"client_lr = {plan.client_lr}: above zero, or None": plan.client_lr is not None and plan.client_lr <= 0,
    }
    if any(wrong.values()):
        raise ConfigError(text for text, so in wrong.items() if so)
    return Problem(gap, smooth, sigma, inside, between, alpha, rho, constants.clients, n, m, tau, plan.commits)


def r0(p: Problem) -> float:
    """(4): 8 (f(x_0) - f*)"""
    return 8 * p.gap


def r1(p: Problem) -> float:
    """(4): 16 L sigma^2 / N"""
    return 16 * p.L * p.sigma / p.N


def r2(p: Problem) -> float:
    """(4): 16 C_1 L^2 (tau^2 eps_g^2 + tau rho^2 D eps_L^2 + tau sigma^2 (1/n + rho^2))"""
    return 16 * C1 * p.L**2 * spread(p)


def spread(p: Problem) -> float:
    """tau^2 eps_g^2 + tau rho^2 D eps_L^2 + tau (1/n + rho^2) sigma^2: the bracket of (6)."""
    return p.tau * (p.tau * p.eps_g + p.rho**2 * p.D * p.eps_L + (1 / p.n + p.rho**2) * p.sigma)


def sampling(p: Problem) -> float:
    """8 R_part^(2) / (eta^2 tau) of (57): what reports from m of n devices add to r_1; zero where rho is.

    L rho^2 [32 C_2 G_p' D (2 D eps_g^2 + D eps_L^2 + (D / (n tau) + 1) sigma^2) + 4 n sigma^2 / (m tau N)]. The step to
    (112) forgets eta (W grad f_j - grad f_k) at the cluster's mean; C_2 = 18, where eps_L asks 12, has room for it.
    """
    noise = (p.D / (p.n * p.tau) + 1) * p.sigma
    mixed = 32 * C2 * p.Gp * p.D * (2 * p.D * p.eps_g + p.D * p.eps_L + noise)
    return p.L * p.rho**2 * (mixed + 4 * p.n * p.sigma / (p.m * p.tau * p.N))


def excess(p: Problem) -> float:
    """(9): E^2 = (eps_g^2 D + rho D eps_L^2 + sigma^2) G_p' D rho N + n / (m tau) rho^2 sigma^2; zero where rho is.

    (60) has rho^2 throughout, which is less and is what (57) gives; Corollary 1 is proved for (9).
    """
    mixed = (p.eps_g * p.D + p.rho * p.D * p.eps_L + p.sigma) * p.Gp * p.D * p.rho * p.N
    return mixed + p.n / (p.m * p.tau) * p.rho**2 * p.sigma


def bound(p: Problem, lr: float, partial: bool) -> float:
    """(53): r_0 / (eta tau R) + r_1 eta + r_2 eta^2, with `sampling` added to r_1 if partial.

    The paper sums R + 1 rounds there; Algorithm 1 has R, as (5) has.
    """
    return r0(p) / (lr * p.tau * p.R) + (r1(p) + partial * sampling(p)) * lr + r2(p) * lr**2


def chosen(p: Problem, largest: float, partial: bool) -> float:
    """(5): min{largest, (r_0 / (r_1 tau R))^1/2, (r_0 / (r_2 tau R))^1/3}, with `sampling` added to r_1 if partial."""
    linear, square = r1(p) + partial * sampling(p), r2(p)
    second = math.sqrt(r0(p) / (linear * p.tau * p.R)) if linear else math.inf
    third = (r0(p) / (square * p.tau * p.R)) ** (1 / 3) if square else math.inf
    return min(largest, second, third) or largest  # zero where the start is the optimum: any rate will do


def largest1(p: Problem) -> float:
    """(50): 1 / (4 C_1 alpha tau L); it implies (27), (120) and (121), which is all that the proof uses."""
    return 1 / (4 * C1 * p.alpha * p.tau * p.L)


def largest2(p: Problem) -> float:
    """The largest eta of (128) and (130), which imply (129); (55) has an unknown C_3 and loses an alpha of (133)."""
    return min(drift(p), steepest(p, True))


def steepest(p: Problem, partial: bool) -> float:
    """(130): the root of A eta^2 + B eta = 1/8; (121) unless partial, where B is zero.

    A = C_1 L^2 tau (tau + rho^2 D) alpha^2, B = 8 C_2 G_p' L D^2 rho^2 alpha^2.
    """
    a = C1 * p.L**2 * p.tau * (p.tau + p.rho**2 * p.D) * p.alpha**2
    b = partial * 8 * C2 * p.Gp * p.L * p.D**2 * p.rho**2 * p.alpha**2
    return 0.25 / (b + math.sqrt(b**2 + a / 2))


def drift(p: Problem) -> float:
    """(27): eta^2 <= 1 / (24 tau (4 tau - 1) L^2)"""
    return 1 / (p.L * math.sqrt(24 * p.tau * (4 * p.tau - 1)))


def least_tau(rho: float) -> float:
    """The least tau with rho <= 1 - 1/tau (7): 1 / (1 - rho), rounded up; infinite at one (appendix E)."""
    if rho >= 1:
        return math.inf
    tau = max(1, round(1 / (1 - rho)))
    return tau if rho <= 1 - 1 / tau else tau + 1


def gossips(rho: float, allowed: float) -> float:
    """The fewest gossip rounds g >= 1 after a step with rho^g <= allowed (appendix E); infinite if none will do.

    g rounds mix by W^g, of rate rho^g where W is symmetric (Metropolis-Hastings weights are), and no worse elsewhere.
    """
    if rho <= allowed:
        return 1
    if allowed <= 0 or rho >= 1:
        return math.inf
    g = max(1, round(math.log(allowed) / math.log(rho)))
    return g if rho**g <= allowed else g + 1


def order1(p: Problem) -> float:
    """(6): sigma / sqrt(N tau R) + spread^1/3 / (tau R)^2/3 + 1/R; constants, L and the gap are left out."""
    return math.sqrt(p.sigma / (p.N * p.tau * p.R)) + float((spread(p) / (p.tau * p.R) ** 2) ** (1 / 3)) + 1 / p.R


def order2(p: Problem) -> float:
    """(8): (6) with sigma + E for sigma and max{1, G_p D rho} / R at the end; constants are left out."""
    more = math.sqrt(excess(p) / (p.N * p.tau * p.R))
    return order1(p) + more + (max(1.0, p.G * p.D * p.rho) - 1) / p.R


def theorem1(constants: Constants, plan: Plan) -> Advice:
    """Every device reports: `bound` (53) at the rate (5), of order (6).

    A given rate is held against (27), (120) and (121), which the proof uses, rather than the stricter (50).
    """
    p = problem(constants, plan)
    lr = plan.client_lr or chosen(p, largest1(p), False)
    conditions = (
        Condition("full", "m >= n", p.m, p.n, least=True),
        Condition("(27)", "eta <= 1 / (L sqrt(24 tau (4 tau - 1)))", lr, drift(p)),
        Condition("(120)", "eta <= 1 / (2 L)", lr, 1 / (2 * p.L)),
        Condition("(121)", "eta^2 <= 1 / (8 C_1 L^2 tau (tau + rho^2 D) alpha^2)", lr, steepest(p, False)),
    )
    return advice("Theorem 1", plan, lr, bound(p, lr, False), conditions, ORDER.format(order1(p)))


def partial(name: str, p: Problem, plan: Plan, network: tuple[Condition, ...], note: str) -> Advice:
    """Theorem 2's rate and bound; `network` holds what is asked of the graphs."""
    lr = plan.client_lr or chosen(p, largest2(p), True)
    text = "C_1 L^2 tau (tau + rho^2 D) alpha^2 eta^2 + 8 C_2 G_p' L D^2 rho^2 alpha^2 eta <= 1/8, solved for eta"
    conditions = (
        *network,
        Condition("(128)", "eta <= 1 / (L sqrt(24 tau (4 tau - 1)))", lr, drift(p)),
        Condition("(129)", "eta <= 1 / (4 L)", lr, 1 / (4 * p.L)),
        Condition("(130)", text, lr, steepest(p, True)),
    )
    return advice(name, plan, lr, bound(p, lr, True), conditions, ORDER.format(order2(p)), note)


def connected(p: Problem) -> Condition:
    return Condition("(7)", "rho <= 1 - 1/tau", p.rho, 1 - 1 / p.tau)


def theorem2(constants: Constants, plan: Plan) -> Advice:
    """m of n devices of a cluster report: `bound` with `sampling`, of order (8), where rho <= 1 - 1/tau (7).

    The "suitably chosen" rate is (5) with `largest2` and r_1 + `sampling`, as appendix B.6 follows the steps of B.5.
    """
    p = problem(constants, plan)
    return partial("Theorem 2", p, plan, (connected(p),), f"(7) holds from tau = {least_tau(p.rho):g}")


def corollary1(constants: Constants, plan: Plan) -> Advice:
    """With rho <= min{m, tau - 1} / (4 N) (11) reports from m of n devices cost no order: E^2 = O(1).

    At tau = 1 only rho = 0 will do. The note says how many gossip rounds after each step would meet (11).
    """
    p = problem(constants, plan)
    allowed = min(p.m, p.tau - 1) / (4 * p.N)
    sparse = Condition("(11)", "rho <= min{m, tau - 1} / (4 N)", p.rho, allowed)
    note = f"(11) holds from {gossips(p.rho, allowed):g} gossip rounds after each step"
    return partial("Corollary 1", p, plan, (connected(p), sparse), note)


def advice(name: str, plan: Plan, lr: float, bound: float, conditions: tuple[Condition, ...], *notes: str) -> Advice:
    """The server takes the mean as it is: a plan with another server_lr is no HL-SGD."""
    if plan.server_lr is not None:
        conditions += (Condition("server_lr", "|server_lr - 1| <= 0", abs(plan.server_lr - 1), 0.0),)
    return Advice(f"HL-SGD, {name}", lr, 1.0, bound, BOUNDED, conditions, notes=notes)


# ---- Table 1: iteration complexities, constants left out --------------------------------------------
def lead(p: Problem) -> float:
    """sigma / sqrt(N tau R): the first term of every line."""
    return math.sqrt(p.sigma / (p.N * p.tau * p.R))


def local_sgd(p: Problem) -> float:
    """(tau^2 eps^2 + tau sigma^2)^1/3 / (tau R)^2/3 + 1 / R, with eps^2 = eps_g^2 + eps_L^2 (Koloskova et al. 2020)."""
    T = p.tau * p.R
    return float(lead(p) + (p.tau**2 * (p.eps_g + p.eps_L) + p.tau * p.sigma) ** (1 / 3) / T ** (2 / 3) + p.tau / T)


def gossip_sgd(p: Problem) -> float:
    """(rho eps)^2/3 / ((1 - rho) T)^2/3 + (rho sigma)^2/3 / (T^2/3 (1 - rho)^1/3) + rho / ((1 - rho) T), T = tau R."""
    T, gap = p.tau * p.R, 1 - p.rho
    if not gap:
        return math.inf
    square = p.rho**2
    apart = (square * (p.eps_g + p.eps_L)) ** (1 / 3) / gap ** (2 / 3) + (square * p.sigma) ** (1 / 3) / gap ** (1 / 3)
    return float(lead(p) + apart / T ** (2 / 3) + p.rho / (gap * T))


def gossip_pga(p: Problem) -> float:
    """C^1/3 rho^2/3 (D^1/3 eps^2/3 + sigma^2/3) / T^2/3 + rho D / T, with C = sum of rho^k over k < tau (Chen et al.
    2021, in the letters of the table's footnote)."""
    T, C = p.tau * p.R, sum(p.rho**k for k in range(p.tau))
    apart = (p.D * (p.eps_g + p.eps_L)) ** (1 / 3) + p.sigma ** (1 / 3)
    return float(lead(p) + (C * p.rho**2) ** (1 / 3) * apart / T ** (2 / 3) + p.rho * p.D / T)


TABLE_1: dict[str, Callable[[Problem], float]] = {
    "local-sgd": local_sgd,
    "gossip-sgd": gossip_sgd,
    "gossip-pga": gossip_pga,
    "hl-sgd": order1,
}


def against_gossip(p: Problem) -> Condition:
    """tau / n <= rho^2 / (1 - rho): where Table 1 puts HL-SGD before gossip SGD on a graph that mixes as well."""
    allowed = p.rho**2 / (1 - p.rho) if p.rho < 1 else math.inf
    return Condition("better than gossip", "tau / n <= rho^2 / (1 - rho)", p.tau / p.n, allowed)


def table1(constants: Constants, plan: Plan) -> Advice:
    """Table 1 on this problem: the order that each method's bound has, the least first, and when HL-SGD beats gossip.

    The rate is Theorem 1's; the orders leave constants out, so they say who gains, not how much."""
    p = problem(constants, plan)
    lr = plan.client_lr or chosen(p, largest1(p), False)
    orders = sorted((rate(p), name) for name, rate in TABLE_1.items())
    said = ", ".join(f"{name} {order:.3g}" for order, name in orders)
    better = against_gossip(p)
    word = "before" if better.holds else "behind"
    notes = (
        f"orders of the bounds on these constants, least first: {said}",
        f"tau / n = {better.given:.3g}, rho^2 / (1 - rho) = {better.allowed:.3g}: HL-SGD stands {word} gossip SGD",
    )
    return Advice("HL-SGD, Table 1", lr, 1.0, None, BOUNDED, (), notes=notes)
