"""FedAvg's theorems with L_h: admissible rates, bounds, and how many local steps keep the rate.

A new theoretical perspective on data heterogeneity in federated averaging (Theorems 4.3, 4.5, 5.5, A.1, Corollaries
4.4, 4.6, A.2, A.3, Appendix B). Letters: gamma client rate, eta server rate, I local steps, M of N clients in a round,
R rounds, L_g `global_smoothness`, L_h `heterogeneity`, L-tilde `smoothness`, zeta^2 `divergence`, F = f(x_0) - f*.
L_h = 0 is a case of its own: what it would limit has no limit.
"""

from __future__ import annotations

import math
from dataclasses import replace

from offbeat.theory.constants import Advice, Condition, Constants, Plan, Rates, known, over, rates_of

ROUNDS = "mean of E |grad f(x_r)|^2 over r < R, and so the least of them"
STEPS = "mean of E |grad f(x_hat_t)|^2 over all t < R I local steps, x_hat the mean of the clients' models"
GENERAL = ("gap", "global_smoothness", "heterogeneity", "noise", "divergence")


def divided(product: float, rate: float) -> float:
    """The largest number whose product with `rate`, rounded, is not above `product`."""
    other = product / rate
    while other * rate > product:
        other = math.nextafter(other, 0)
    return other


# ---- Theorem 4.3 and Corollary 4.4: all clients -------------------------------------------------
def limits(constants: Constants, plan: Plan) -> tuple[float, float]:
    """gamma <= 1 / (30 (L_h + L_g) I), gamma eta <= 1 / (4 I L_g) (Theorems 4.3 and 4.5)."""
    smooth, hetero = known(constants, plan, "global_smoothness", "heterogeneity")
    return 1 / (30 * (hetero + smooth) * plan.local_steps), 1 / (4 * plan.local_steps * smooth)


def largest_rates(plan: Plan, client: float, product: float) -> Rates:
    """The largest rates under these limits, beside one that the plan has."""
    if plan.client_lr is None and plan.server_lr is not None:
        client = min(client, divided(product, plan.server_lr))
    return rates_of(plan, Rates(client, divided(product, plan.client_lr or client)))


def full_bound(constants: Constants, plan: Plan, rates: Rates) -> float:
    """4 F / (gamma eta R I) + 2 gamma eta L_g sigma^2 / N + 20 gamma^2 L_g^2 (I - 1) sigma^2 / N
    + 72 gamma^2 L_h^2 (I - 1)^2 zeta^2 + 24 gamma^2 L_h^2 (I - 1) sigma^2: Theorem 4.3.

    Constants from line (b) of (B.17) and c = 3. For the two terms in sigma^2 / N (B.18) has gamma eta L_g sigma^2 / N;
    (B.17) gives 4 times that, and only if eta >= 10 gamma L_g (I - 1): so they are kept apart here.
    """
    gap, smooth, hetero, noise, zeta = known(constants, plan, *GENERAL)
    more, gamma2 = plan.local_steps - 1, rates.client**2
    start = over(4 * gap, rates.product * plan.commits * plan.local_steps)
    sgd = (2 * rates.product * smooth + 20 * gamma2 * smooth**2 * more) * noise / constants.clients
    return start + sgd + gamma2 * hetero**2 * (72 * more**2 * zeta + 24 * more * noise)


def theorem43(constants: Constants, plan: Plan) -> Advice:
    """FedAvg of all clients; the rates, where the plan has none, are the largest that the theorem admits."""
    known(constants, plan, *GENERAL)
    rates = largest_rates(plan, *limits(constants, plan))
    conditions = (*general(constants, plan, rates, "Theorem 4.3"), everyone(constants, plan))
    return Advice("FedAvg, Theorem 4.3", *rates, full_bound(constants, plan, rates), ROUNDS, conditions)


def general(constants: Constants, plan: Plan, rates: Rates, name: str) -> tuple[Condition, ...]:
    client, product = limits(constants, plan)
    return (
        Condition(name, "gamma <= 1 / (30 (L_h + L_g) I)", rates.client, client),
        Condition(name, "gamma eta <= 1 / (4 I L_g)", rates.product, product),
    )


def everyone(constants: Constants, plan: Plan) -> Condition:
    return Condition("full participation", "M >= N", plan.cohort, constants.clients, least=True)


def short_rate(constants: Constants, plan: Plan) -> float:
    """gamma = min(1, 1 / (L_h I)) / sqrt(R I N): Corollaries 4.4 and 4.6 (B.7, whose second case prints both)."""
    (hetero,) = known(constants, plan, "heterogeneity")
    steps = plan.local_steps
    return min(1.0, over(1, hetero * steps)) / math.sqrt(plan.commits * steps * constants.clients)


def own_rates(constants: Constants, plan: Plan, product: float) -> Rates:
    """A corollary's rates: its gamma, or the plan's, and the eta that makes up its gamma eta."""
    client = short_rate(constants, plan) if plan.client_lr is None else plan.client_lr
    return rates_of(plan, Rates(client, product / client))


def full_product(constants: Constants, plan: Plan) -> float:
    """gamma eta = sqrt(F N / (R I L_g sigma^2)) (Corollary 4.4)."""
    gap, smooth, noise = known(constants, plan, "gap", "global_smoothness", "noise")
    return math.sqrt(over(gap * constants.clients, plan.commits * plan.local_steps * smooth * noise))


def drift_steps(constants: Constants, plan: Plan) -> float:
    """I <= R N / (900 (L_g + L_h)^2) (B.21): up to there the corollaries' gamma is admissible."""
    smooth, hetero = known(constants, plan, "global_smoothness", "heterogeneity")
    return plan.commits * constants.clients / (900 * (smooth + hetero) ** 2)


def full_steps(constants: Constants, plan: Plan) -> float:
    """I <= R sigma^2 / (16 F N L_g) (B.7): up to there gamma eta of Corollary 4.4 is admissible."""
    gap, smooth, noise = known(constants, plan, "gap", "global_smoothness", "noise")
    return over(plan.commits * noise, 16 * gap * constants.clients * smooth)


def corollary44(constants: Constants, plan: Plan) -> Advice:
    """FedAvg of all clients at the rate sqrt(F L_g sigma^2 / (R I N)) + (zeta^2 + sigma^2 / I) / (R I N) (13).

    The bound is Theorem 4.3's at these rates; (13) itself has no constants.
    """
    known(constants, plan, *GENERAL)
    rates = own_rates(constants, plan, full_product(constants, plan))
    steps = (
        Condition("(B.21)", "I <= R N / (900 (L_g + L_h)^2)", plan.local_steps, drift_steps(constants, plan)),
        Condition("B.7", "I <= R sigma^2 / (16 F N L_g)", plan.local_steps, full_steps(constants, plan)),
    )
    conditions = (*general(constants, plan, rates, "Theorem 4.3"), *steps, everyone(constants, plan))
    notes = (kept(min(step.allowed for step in steps)),)
    return Advice("FedAvg, Corollary 4.4", *rates, full_bound(constants, plan, rates), ROUNDS, conditions, notes=notes)


def kept(steps: float) -> str:
    return f"up to I = {math.floor(steps) if steps < math.inf else steps} local steps keep the rate"


# ---- Theorem 4.5 and Corollary 4.6: M drawn with replacement ------------------------------------
def partial_bound(constants: Constants, plan: Plan, rates: Rates) -> float:
    """8 F / (gamma eta I R) + 4 gamma eta L_g sigma^2 / M + 16 gamma eta L_g I zeta^2 / M
    + 16 (L_h^2 + gamma eta L_g^3 I / M) gamma^2 (9 (I - 1)^2 zeta^2 + 3 (I - 1) sigma^2)
    + 60 gamma^2 L_g^2 (I - 1) sigma^2 / N: Theorem 4.5, (B.39) with c = 3.

    The last term is (B.36)'s; (B.38) rounds it up to gamma eta sigma^2 / N, which (B.39) forgets.
    """
    gap, smooth, hetero, noise, zeta = known(constants, plan, *GENERAL)
    steps, more, gamma2, product = plan.local_steps, plan.local_steps - 1, rates.client**2, rates.product
    start = over(8 * gap, product * plan.commits * steps)
    sgd = 4 * product * smooth * (noise + 4 * steps * zeta) / plan.cohort
    apart = hetero**2 + product * smooth**3 * steps / plan.cohort
    local = 16 * apart * gamma2 * (9 * more**2 * zeta + 3 * more * noise)
    return start + sgd + local + 60 * gamma2 * smooth**2 * more * noise / constants.clients


def few(constants: Constants, plan: Plan) -> float:
    """gamma eta <= M / (8 I L_g): (B.37) needs it of M = 1, where 1 / (4 I L_g) leaves nothing of the descent."""
    (smooth,) = known(constants, plan, "global_smoothness")
    return plan.cohort / (8 * plan.local_steps * smooth)


def sampled(constants: Constants, plan: Plan, rates: Rates) -> tuple[Condition, ...]:
    return (
        *general(constants, plan, rates, "Theorem 4.5"),
        Condition("(B.37)", "gamma eta <= M / (8 I L_g)", rates.product, few(constants, plan)),
        Condition("Theorem 4.5", "M <= N", plan.cohort, constants.clients),
    )


def theorem45(constants: Constants, plan: Plan) -> Advice:
    """FedAvg of M clients drawn with replacement, each draw with its own noise (B.28); the largest rates admitted."""
    known(constants, plan, *GENERAL)
    client, product = limits(constants, plan)
    rates = largest_rates(plan, client, min(product, few(constants, plan)))
    conditions = sampled(constants, plan, rates)
    return Advice("FedAvg, Theorem 4.5", *rates, partial_bound(constants, plan, rates), ROUNDS, conditions)


def partial_product(constants: Constants, plan: Plan) -> float:
    """gamma eta = sqrt(M F / (L_g I R (sigma^2 + I zeta^2))) (Corollary 4.6)."""
    gap, smooth, noise, zeta = known(constants, plan, "gap", "global_smoothness", "noise", "divergence")
    spread = smooth * plan.local_steps * plan.commits * (noise + plan.local_steps * zeta)
    return math.sqrt(over(plan.cohort * gap, spread))


def partial_steps(constants: Constants, plan: Plan) -> float:
    """I (16 F M L_g - R zeta^2) <= R sigma^2: up to there gamma eta of Corollary 4.6 is admissible, as in B.7.

    No limit once R zeta^2 >= 16 F M L_g. With M = 1, by (B.37), 64 stands for 16.
    """
    gap, smooth, noise, zeta = known(constants, plan, "gap", "global_smoothness", "noise", "divergence")
    rest = (64 if plan.cohort == 1 else 16) * gap * plan.cohort * smooth - plan.commits * zeta
    return plan.commits * noise / rest if rest > 0 else math.inf


def corollary46(constants: Constants, plan: Plan) -> Advice:
    """FedAvg of M clients at the rate sqrt(F L_g zeta^2 / (R M)) + sqrt(F L_g sigma^2 / (R I M))
    + (zeta^2 + sigma^2 / I) / (R I N) (15). The bound is Theorem 4.5's at these rates.
    """
    known(constants, plan, *GENERAL)
    rates = own_rates(constants, plan, partial_product(constants, plan))
    text = "I (16 F M L_g - R zeta^2) <= R sigma^2"
    steps = (
        Condition("(B.21)", "I <= R N / (900 (L_g + L_h)^2)", plan.local_steps, drift_steps(constants, plan)),
        Condition("B.7", text, plan.local_steps, partial_steps(constants, plan)),
    )
    conditions = (*sampled(constants, plan, rates), *steps)
    notes = (kept(min(step.allowed for step in steps)),)
    return Advice(
        "FedAvg, Corollary 4.6", *rates, partial_bound(constants, plan, rates), ROUNDS, conditions, notes=notes
    )


# ---- Theorems 5.5 and A.1: quadratics -----------------------------------------------------------
def common_bound(constants: Constants, plan: Plan, client_lr: float) -> float:
    """2 F / (gamma R I) + gamma L_g sigma^2 / N: local SGD with one Hessian (18), constants of (B.52)."""
    gap, smooth, noise = known(constants, plan, "gap", "global_smoothness", "noise")
    start = over(2 * gap, client_lr * plan.commits * plan.local_steps)
    return start + client_lr * smooth * noise / constants.clients


def minibatch_bound(constants: Constants, plan: Plan, rate: float) -> float:
    """2 F / (gamma R) + gamma L_g sigma^2 / (N I), gamma <= 1 / L_g: mini-batch SGD, batches of I, (19) and (A.3)."""
    gap, smooth, noise = known(constants, plan, "gap", "global_smoothness", "noise")
    return over(2 * gap, rate * plan.commits) + rate * smooth * noise / (constants.clients * plan.local_steps)


def compared(constants: Constants, plan: Plan, local: float) -> str:
    """Local SGD beside mini-batch SGD at its largest rate, bound to bound."""
    (smooth,) = known(constants, plan, "global_smoothness")
    batch = minibatch_bound(constants, plan, 1 / smooth)
    words = "is below" if local < batch else "is not below"
    return f"local SGD's bound {words} {batch:.6g}, that of mini-batch SGD with batches of I at the rate 1 / L_g"


def single(name: str, rates: Rates) -> Condition:
    return Condition(name, "eta = 1", abs(rates.server - 1), 0)


def theorem55(constants: Constants, plan: Plan) -> Advice:
    """Local SGD where all A_i = A, so L_h = 0 and L_g = |lambda(A)|: gamma <= 1 / |lambda(A)|, whatever I; eta = 1.

    gamma = 1 / sqrt(R I), as B.1 (3) has it; 1 / |lambda(A)| without noise, as after Theorem 5.5.
    """
    _, smooth, hetero, noise = known(constants, plan, "gap", "global_smoothness", "heterogeneity", "noise")
    chosen = 1 / math.sqrt(plan.commits * plan.local_steps) if noise else 1 / smooth
    rates = rates_of(plan, Rates(chosen, 1.0))
    conditions = (
        Condition("Theorem 5.5", "gamma <= 1 / |lambda(A)|", rates.client, 1 / smooth),
        Condition("Theorem 5.5", "L_h = 0", hetero, 0),
        single("Theorem 5.5", rates),
        everyone(constants, plan),
    )
    least = common_bound(constants, plan, rates.client)
    return Advice("FedAvg, Theorem 5.5", *rates, least, STEPS, conditions, notes=(compared(constants, plan, least),))


def quadratic_limit(constants: Constants, plan: Plan) -> float:
    """gamma <= min(1 / L-tilde, 1 / (2 I L_h)) (Theorem A.1).

    It prints 1 / (T L_h), (B.68) 1 / (T L); step (a) of (B.67) needs 1 / (2 I L_h), which is taken.
    """
    smoothness, hetero = known(constants, plan, "smoothness", "heterogeneity")
    return min(1 / smoothness, over(1, 2 * plan.local_steps * hetero))


def quadratic_bound(constants: Constants, plan: Plan, client_lr: float) -> float:
    """4 F / (gamma R I) + 2 gamma L_g sigma^2 / N + 16 gamma^2 L_h^2 (I - 1)^2 zeta^2 + 4 gamma^2 L_h^2 I sigma^2.

    Theorem A.1, (B.68), which prints half the second term that (B.67) gives. The proof needs A_i >= 0 (I - gamma A_i
    of norm at most 1), and in (B.67) puts grad f(x_hat_t) for grad f(x_r): taken as it stands.
    """
    gap, smooth, hetero, noise, zeta = known(constants, plan, *GENERAL)
    steps, drift = plan.local_steps, (client_lr * hetero) ** 2
    start = over(4 * gap, client_lr * plan.commits * steps)
    sgd = 2 * client_lr * smooth * noise / constants.clients
    return start + sgd + drift * (16 * (steps - 1) ** 2 * zeta + 4 * steps * noise)


def theorem_a1(constants: Constants, plan: Plan) -> Advice:
    """Local SGD on quadratics with L_h > 0, eta = 1; gamma = (R I)^(-1/3), as Corollaries A.2 and A.3 take it."""
    known(constants, plan, "smoothness", *GENERAL)
    rates = rates_of(plan, Rates((plan.commits * plan.local_steps) ** (-1 / 3), 1.0))
    most = quadratic_limit(constants, plan)
    conditions = (
        Condition("Theorem A.1", "gamma <= min(1 / L-tilde, 1 / (2 I L_h))", rates.client, most),
        single("Theorem A.1", rates),
        everyone(constants, plan),
    )
    least = quadratic_bound(constants, plan, rates.client)
    return Advice("FedAvg, Theorem A.1", *rates, least, STEPS, conditions, notes=(compared(constants, plan, least),))


def corollary_a3(constants: Constants, plan: Plan) -> Advice:
    """Theorem A.1 at the rate (F + zeta^2) / (R I)^(2/3) + 2 N F / (L_g R I^2) (A.6): local steps and noise are few.

    Without noise it is Corollary A.2, whose region, where local SGD wins, should read I^(2/3) L_g >= R^(1/3).
    """
    advice = theorem_a1(constants, plan)
    gap, smooth, hetero, noise, _ = known(constants, plan, *GENERAL)
    quiet = 2 * constants.clients * gap / (advice.client_lr**2 * smooth * plan.commits * plan.local_steps)
    conditions = (
        *advice.conditions,
        Condition("Corollary A.3", "I <= 1 / L_h", plan.local_steps, over(1, hetero)),
        Condition("Corollary A.3", "sigma^2 <= 2 N F / (gamma^2 L_g R I)", noise, quiet),
    )
    return replace(advice, theorem="FedAvg, Corollary A.3", conditions=conditions)
