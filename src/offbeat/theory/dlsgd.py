"""DLSGD's theorems: the rates they take, what they bound, and from which T on.

Delayed Local-SGD for distributed learning with linear speedup (Theorems 1 and 2, Appendix A).
Letters: eta-bar client rate, eta server rate, K local steps, n updates in a commit, T commits, lambda staleness,
D = F(w_0) - F*.
"""

from __future__ import annotations

import math

from offbeat.errors import ConfigError
from offbeat.theory.constants import Advice, Condition, Constants, Plan, Rates, known, over, rates_of

MEAN = "mean of E |grad F(w_t)|^2 over t < T"


def likely_staleness(clients: int, cohort: int, commits: int, risk: float) -> float:
    """(1 + log(N T / risk)) / p, p = 1 - (1 - 1/N)^n: how long a client stays undrawn, but for probability `risk`.

    After Assumption 4 (Gu et al., Theorem 5.2), which leaves the factor open: 1 is enough, as in N T windows of m
    rounds one has no draw with probability at most N T (1 - p)^m.
    """
    if not 0 < risk < 1 or min(clients, cohort, commits) < 1:
        raise ConfigError(["likely_staleness: give at least 1 client, draw and commit, and a risk between 0 and 1"])
    return (1 + math.log(clients * commits / risk)) / (1 - (1 - 1 / clients) ** cohort)


def delay(plan: Plan) -> int:
    """lambda: Assumption 4 has it at least 1."""
    return max(1, plan.staleness)


# ---- Theorem 1: DLSGD-homo ----------------------------------------------------------------------
def homo_rates(constants: Constants, plan: Plan) -> Rates:
    """eta-bar = 1 / (K sqrt(sigma^2 L T)), eta = sqrt(n K D / 2): the choice of Theorem 1."""
    gap, smoothness, noise = known(constants, plan, "gap", "smoothness", "noise")
    client = over(1, plan.local_steps * math.sqrt(noise * smoothness * plan.commits))
    return Rates(client, math.sqrt(plan.cohort * plan.local_steps * gap / 2))


def homo_limits(constants: Constants, plan: Plan) -> tuple[float, float]:
    """(10): eta-bar <= 1 / (4 sqrt(3) L K), eta eta-bar <= 1 / (4 L K lambda)."""
    (smoothness,) = known(constants, plan, "smoothness")
    once = smoothness * plan.local_steps
    return 1 / (4 * math.sqrt(3) * once), 1 / (4 * once * delay(plan))


def homo_bound(constants: Constants, plan: Plan, rates: Rates) -> float:
    """4 D / (K T eta eta-bar) + 8 L eta eta-bar sigma^2 / n + 8 L^2 K eta-bar^2 sigma^2: A.1, for all rates in (10).

    With those of Theorem 1 it is sqrt(128 sigma^2 L D / (n K T)) + 8 L / (K T). (11) prints 128 D under the root, the
    end of A.1 128 L D, and both 8 L / (sigma^2 K T): slips, as putting the rates in shows.
    """
    gap, smoothness, noise = known(constants, plan, "gap", "smoothness", "noise")
    start = over(4 * gap, plan.local_steps * plan.commits * rates.product)
    drift = 8 * smoothness**2 * plan.local_steps * rates.client**2 * noise
    return start + 8 * smoothness * rates.product * noise / plan.cohort + drift


def homo_commits(constants: Constants, plan: Plan) -> float:
    """(12): T >= max(48 L, 8 n L K lambda^2 D) / sigma^2, where Theorem 1's rates meet (10). It prints -D for D."""
    gap, smoothness, noise = known(constants, plan, "gap", "smoothness", "noise")
    shape = plan.cohort * plan.local_steps * delay(plan) ** 2
    return over(max(48 * smoothness, 8 * smoothness * shape * gap), noise)


def homo_speedup(constants: Constants, plan: Plan) -> float:
    """T from which twice the n takes half the T: (12), and the root is the larger term: T >= n L / (2 K sigma^2 D)."""
    gap, smoothness, noise = known(constants, plan, "gap", "smoothness", "noise")
    root = over(plan.cohort * smoothness, 2 * plan.local_steps * noise * gap)
    return max(homo_commits(constants, plan), root)


def theorem1(constants: Constants, plan: Plan) -> Advice:
    """DLSGD-homo, rates by `homo_rates` or the plan's own, held against (10)."""
    rates = rates_of(plan, homo_rates(constants, plan))
    client, product = homo_limits(constants, plan)
    conditions = (
        Condition("(10)", "eta-bar <= 1 / (4 sqrt(3) L K)", rates.client, client),
        Condition("(10)", "eta eta-bar <= 1 / (4 L K lambda)", rates.product, product),
    )
    notes = (
        f"Theorem 1's own rates meet (10) from T = {homo_commits(constants, plan):.6g} on (12)",
        f"linear speed-up in n from T = {homo_speedup(constants, plan):.6g} on",
    )
    return Advice("DLSGD, Theorem 1", *rates, homo_bound(constants, plan, rates), MEAN, conditions, notes=notes)


# ---- Theorem 2: DLSGD-hetero --------------------------------------------------------------------
def spread(constants: Constants, plan: Plan) -> float:
    """S = 4 sigma^2 L + 2 L K G^2, the variance of a commit's direction, times L."""
    smoothness, noise, gradient = known(constants, plan, "smoothness", "noise", "gradient")
    return 4 * noise * smoothness + 2 * smoothness * plan.local_steps * gradient


def hetero_rates(constants: Constants, plan: Plan) -> Rates:
    """eta-bar = 1 / (K sqrt((4 sigma^2 L + 2 L K G^2) T)), eta = sqrt(4 n K D): the choice of Theorem 2."""
    (gap,) = known(constants, plan, "gap")
    client = over(1, plan.local_steps * math.sqrt(spread(constants, plan) * plan.commits))
    return Rates(client, math.sqrt(4 * plan.cohort * plan.local_steps * gap))


def hetero_limits(constants: Constants, plan: Plan) -> tuple[float, float, float]:
    """(13): eta-bar <= 1 / (8 L K), eta eta-bar <= 1 / (4 L K lambda) and
    eta eta-bar <= (2 sigma^2 + G^2 K) / (8 sigma^2 L K lambda + 4 L G^2 K^2 lambda^2).
    """
    smoothness, noise, gradient = known(constants, plan, "smoothness", "noise", "gradient")
    once, late, pull = smoothness * plan.local_steps, delay(plan), gradient * plan.local_steps
    both = 2 * noise + pull
    mixed = both / (4 * once * late * (2 * noise + pull * late)) if both else math.inf
    return 1 / (8 * once), 1 / (4 * once * late), mixed


def hetero_bound(constants: Constants, plan: Plan, rates: Rates) -> float:
    """4 D / (K T eta eta-bar) + (16 sigma^2 L + 8 L G^2 K) eta eta-bar / n + 8 L^2 K (sigma^2 + 8 K nu^2) eta-bar^2.

    End of A.2, for all rates in (13). With those of Theorem 2 it is, S = 4 sigma^2 L + 2 L K G^2,
    sqrt(100 S D / (n K T)) + 8 L^2 (sigma^2 + 8 K nu^2) / (S K T); (14) prints 1024 for 100, which holds but is not
    equal. Assumption 6 asks nu of every client; Lemma 9 uses the mean over clients, which is taken here.
    """
    gap, smoothness, noise, nu = known(constants, plan, "gap", "smoothness", "noise", "mean_divergence")
    start = over(4 * gap, plan.local_steps * plan.commits * rates.product)
    drift = 8 * smoothness**2 * plan.local_steps * (noise + 8 * plan.local_steps * nu) * rates.client**2
    return start + 4 * spread(constants, plan) * rates.product / plan.cohort + drift


def hetero_commits(constants: Constants, plan: Plan) -> float:
    """T from which Theorem 2's rates meet (13): 64 L^2 / S and 4 n D / (K S m^2), m the limit of eta eta-bar.

    That is of the order n lambda^4 (after (14)); section 5 prints n K lambda^4, but S grows with K.
    """
    gap, smoothness = known(constants, plan, "gap", "smoothness")
    _, first, second = hetero_limits(constants, plan)
    product = 4 * plan.cohort * gap / (plan.local_steps * min(first, second) ** 2)
    return over(max(64 * smoothness**2, product), spread(constants, plan))


def hetero_speedup(constants: Constants, plan: Plan) -> float:
    """T from which twice the n takes half the T: (13) holds and the root is the larger term of `hetero_bound`."""
    gap, smoothness, noise, nu = known(constants, plan, "gap", "smoothness", "noise", "mean_divergence")
    drift = 8 * smoothness**2 * (noise + 8 * plan.local_steps * nu)
    root = over(plan.cohort * drift**2, 100 * gap * plan.local_steps * spread(constants, plan) ** 3)
    return max(hetero_commits(constants, plan), root)


def theorem2(constants: Constants, plan: Plan) -> Advice:
    """DLSGD-hetero, rates by `hetero_rates` or the plan's own, held against (13); n <= N as (41) uses it."""
    known(constants, plan, "gap", "smoothness", "noise", "gradient", "mean_divergence")
    rates = rates_of(plan, hetero_rates(constants, plan))
    client, product, mixed = hetero_limits(constants, plan)
    text = "(2 sigma^2 + G^2 K) / (8 sigma^2 L K lambda + 4 L G^2 K^2 lambda^2)"
    conditions = (
        Condition("(13)", "eta-bar <= 1 / (8 L K)", rates.client, client),
        Condition("(13)", "eta eta-bar <= 1 / (4 L K lambda)", rates.product, product),
        Condition("(13)", f"eta eta-bar <= {text}", rates.product, mixed),
        Condition("(41)", "n <= N", plan.cohort, constants.clients),
    )
    notes = (
        f"Theorem 2's own rates meet (13) from T = {hetero_commits(constants, plan):.6g} on",
        f"linear speed-up in n from T = {hetero_speedup(constants, plan):.6g} on",
    )
    return Advice("DLSGD, Theorem 2", *rates, hetero_bound(constants, plan, rates), MEAN, conditions, notes=notes)
