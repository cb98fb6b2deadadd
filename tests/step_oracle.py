"""Step-asynchronous federated methods written a second time, slowly and plainly, as an oracle for the real ones.

Client i has the quadratic f_i(w) = 1/2 w'A_i w - b_i'w, whose gradient A_i w - b_i is exact: no noise, no batches.
`matrices` holds the A_i, `linear` the b_i, `weights` the p_i (sum one), `steps[t][i]` the number of local steps of
client i in round t (at least one; rounds count from zero), `participants[t]` the clients of round t (None: all).
A cohort shares the weight among its own: w_i = p_i / (sum of p over the cohort). Every method returns the server's
models after each round. The closed forms at the end take one number of steps per client, the same in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arrays = Sequence[Array]
Steps = Sequence[Sequence[int]]
Participants = Sequence[Sequence[int]] | None
Rate = float | Callable[[int], float]


# ---- what the methods share ---------------------------------------------------------------------
def gradient(matrix: Array, vector: Array, point: Array) -> Array:
    return matrix @ point - vector


def cohort_of(participants: Participants, round_: int, clients: int) -> list[int]:
    return list(range(clients)) if participants is None else list(participants[round_])


def shares_of(weights: Sequence[float], cohort: Sequence[int]) -> dict[int, float]:
    total = 0.0
    for i in cohort:
        total += weights[i]
    return {i: weights[i] / total for i in cohort}


def references(matrices: Arrays, linear: Arrays, start: Array, init: str) -> list[Array]:
    """The vectors that the clients hold before the first round: full gradients at the start, or zeros."""
    if init == "gradients":
        return [gradient(a, b, start) for a, b in zip(matrices, linear, strict=True)]
    if init == "zeros":
        return [np.zeros_like(start) for _ in matrices]
    raise ValueError(f"init: {init}")


# ---- FedAvg and FedProx -------------------------------------------------------------------------
def fedavg(
    matrices: Arrays,
    linear: Arrays,
    weights: Sequence[float],
    start: Array,
    steps: Steps,
    lr: float,
    rounds: int,
    participants: Participants = None,
) -> list[Array]:
    """McMahan et al. 2017: local gradient steps, then the weighted mean of the models."""
    x = np.array(start, dtype=np.float64)
    models = []
    for t in range(rounds):
        cohort = cohort_of(participants, t, len(matrices))
        share = shares_of(weights, cohort)
        new = np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            for _ in range(steps[t][i]):
                y = y - lr * gradient(matrices[i], linear[i], y)
            new = new + share[i] * y
        x = new
        models.append(x.copy())
    return models


def fedprox(
    matrices: Arrays,
    linear: Arrays,
    weights: Sequence[float],
    start: Array,
    steps: Steps,
    lr: float,
    mu: float,
    rounds: int,
    participants: Participants = None,
) -> list[Array]:
    """Li et al. 2020: client i descends f_i(y) + mu/2 |y - x|^2, where x is the model it was sent."""
    x = np.array(start, dtype=np.float64)
    models = []
    for t in range(rounds):
        cohort = cohort_of(participants, t, len(matrices))
        share = shares_of(weights, cohort)
        new = np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            for _ in range(steps[t][i]):
                y = y - lr * (gradient(matrices[i], linear[i], y) + mu * (y - x))
            new = new + share[i] * y
        x = new
        models.append(x.copy())
    return models


# ---- FedNova ------------------------------------------------------------------------------------
def accumulation(k: int, lr: float, rho: float, mu: float) -> Array:
    """The vector a of a solver with k steps: its displacement is y - x = -lr * (a_0 g_0 + ... + a_{k-1} g_{k-1}).

    The solver is linear in the gradients once they are given, so a_j is found by feeding it one gradient of size one at
    step j and zeros elsewhere. By hand: rho = mu = 0 gives ones; mu = 0 gives a_j = (1 - rho^(k-j)) / (1 - rho);
    rho = 0 gives a_j = (1 - lr mu)^(k-1-j). With both, the coefficients swing and can fall below zero.
    """
    a = np.zeros(k)
    for j in range(k):
        displacement, momentum = 0.0, 0.0
        for step in range(k):
            fed = 1.0 if step == j else 0.0
            momentum = rho * momentum + fed + mu * displacement
            displacement = displacement - lr * momentum
        a[j] = -displacement / lr
    return a


def fednova(
    matrices: Arrays,
    linear: Arrays,
    weights: Sequence[float],
    start: Array,
    steps: Steps,
    lr: float,
    rounds: int,
    rho: float = 0.0,
    mu: float = 0.0,
    participants: Participants = None,
    size: str = "sum",
) -> list[Array]:
    """Wang et al. 2020: x <- x - lr tau_eff sum w_i d_i, with d_i = (x - y_i) / (lr |a_i|), tau_eff = sum w_i |a_i|.

    `size` says what |a_i| is: the "sum" of the coefficients, or the "norm", the sum of their absolute values. They
    differ only where a coefficient is negative, which takes both rho and mu (or lr mu > 1).
    """
    if size not in ("sum", "norm"):
        raise ValueError(f"size: {size}")
    x = np.array(start, dtype=np.float64)
    models = []
    for t in range(rounds):
        cohort = cohort_of(participants, t, len(matrices))
        share = shares_of(weights, cohort)
        tau_eff = 0.0
        direction = np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            momentum = np.zeros_like(x)
            for _ in range(steps[t][i]):
                momentum = rho * momentum + gradient(matrices[i], linear[i], y) + mu * (y - x)
                y = y - lr * momentum
            a = accumulation(steps[t][i], lr, rho, mu)
            length = float(np.sum(a)) if size == "sum" else float(np.sum(np.abs(a)))
            tau_eff += share[i] * length
            direction = direction + share[i] * (x - y) / (lr * length)
        x = x - lr * tau_eff * direction
        models.append(x.copy())
    return models


# ---- SCAFFOLD -----------------------------------------------------------------------------------
def scaffold(
    matrices: Arrays,
    linear: Arrays,
    weights: Sequence[float],
    start: Array,
    steps: Steps,
    lr: float,
    rounds: int,
    option: int = 2,
    server_lr: float = 1.0,
    init: str = "zeros",
    participants: Participants = None,
) -> list[Array]:
    """Karimireddy et al. 2020, Algorithm 1; `option` 1 or 2 is its rule for the new c_i: I or II.

    With weights: x <- x + server_lr sum w_i (y_i - x) and c <- c + (sum of p over the cohort) sum w_i (c_i+ - c_i),
    which for p_i = 1/N is the paper's (1/N) sum. The control of the server starts at sum p_i c_i.
    """
    if option not in (1, 2):
        raise ValueError(f"option: {option}")
    x = np.array(start, dtype=np.float64)
    controls = references(matrices, linear, x, init)
    c = np.zeros_like(x)
    for p, control in zip(weights, controls, strict=True):
        c = c + p * control
    models = []
    for t in range(rounds):
        cohort = cohort_of(participants, t, len(matrices))
        share = shares_of(weights, cohort)
        move = np.zeros_like(x)
        change = np.zeros_like(x)
        present = 0.0
        for i in cohort:
            y = x.copy()
            for _ in range(steps[t][i]):
                y = y - lr * (gradient(matrices[i], linear[i], y) - controls[i] + c)
            if option == 1:
                control = gradient(matrices[i], linear[i], x)
            else:
                control = controls[i] - c + (x - y) / (steps[t][i] * lr)
            move = move + share[i] * (y - x)
            change = change + share[i] * (control - controls[i])
            controls[i] = control
            present += weights[i]
        x = x + server_lr * move
        c = c + present * change
        models.append(x.copy())
    return models


# ---- FedLin -------------------------------------------------------------------------------------
def fedlin(
    matrices: Arrays,
    linear: Arrays,
    weights: Sequence[float],
    start: Array,
    steps: Steps,
    lr: float,
    rounds: int,
) -> list[Array]:
    """Mitra et al. 2021, without compression: the gradients at the server's model correct the same round.

    Client i takes K_i steps of length lr / K_i, so that every client goes about as far. All clients take part.
    """
    x = np.array(start, dtype=np.float64)
    models = []
    for t in range(rounds):
        at_server = [gradient(a, b, x) for a, b in zip(matrices, linear, strict=True)]
        mean = np.zeros_like(x)
        for p, g in zip(weights, at_server, strict=True):
            mean = mean + p * g
        new = np.zeros_like(x)
        for i in range(len(matrices)):
            y = x.copy()
            for _ in range(steps[t][i]):
                y = y - (lr / steps[t][i]) * (gradient(matrices[i], linear[i], y) - at_server[i] + mean)
            new = new + weights[i] * y
        x = new
        models.append(x.copy())
    return models


# ---- FedaGrac -----------------------------------------------------------------------------------
def fedagrac(
    matrices: Arrays,
    linear: Arrays,
    weights: Sequence[float],
    start: Array,
    steps: Steps,
    lr: float,
    calibration: Rate,
    variant: str,
    rounds: int,
    init: str = "gradients",
    reference: str = "mean",
    participants: Participants = None,
    epoch: int | None = None,
) -> list[Array]:
    """FedaGrac, Algorithm 1, and the three other schemes of its section 4.2.

    `variant`, by who sends the first gradient and who the mean of the round's gradients: "fedagrac": the faster
    clients (K_i above the mean K of the cohort) the first, the rest the mean; "reverse": the other way round; "avg":
    all the mean; "first": all the first. `reference`: what a client keeps for its own next correction: the "mean"
    (line 11) or the "transit", which is what it sends (equation (4)). `epoch`: the first gradient is the mean of the
    gradients of the first min(epoch, K_i) local steps (None: the gradient of step 0). `calibration` is lambda, a
    number or a function of the round. An absent client keeps its reference, and what it sent last still counts.
    """
    if variant not in ("fedagrac", "avg", "first", "reverse"):
        raise ValueError(f"variant: {variant}")
    if reference not in ("mean", "transit"):
        raise ValueError(f"reference: {reference}")
    x = np.array(start, dtype=np.float64)
    own = references(matrices, linear, x, init)
    sent = [nu_i.copy() for nu_i in own]
    nu = np.zeros_like(x)
    for p, nu_i in zip(weights, own, strict=True):
        nu = nu + p * nu_i
    models = []
    for t in range(rounds):
        rate = calibration(t) if callable(calibration) else calibration
        cohort = cohort_of(participants, t, len(matrices))
        share = shares_of(weights, cohort)
        mean_steps = 0.0
        for i in cohort:
            mean_steps += share[i] * steps[t][i]

        new = np.zeros_like(x)
        change = np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            correction = nu - own[i]
            gradients = []
            for _ in range(steps[t][i]):
                g = gradient(matrices[i], linear[i], y)
                gradients.append(g)
                y = y - lr * (g + rate * correction)
            mean = sum(gradients, np.zeros_like(x)) / len(gradients)
            early = gradients[: 1 if epoch is None else epoch]
            first = sum(early, np.zeros_like(x)) / len(early)

            # The weights need not add up to one in the last digit: a client at the mean is not a faster one.
            faster = steps[t][i] > mean_steps * (1 + 1e-9)
            if variant == "avg":
                transit = mean
            elif variant == "first":
                transit = first
            elif variant == "fedagrac":
                transit = first if faster else mean
            else:
                transit = mean if faster else first

            new = new + share[i] * y
            change = change + weights[i] * (transit - sent[i])
            sent[i] = transit
            own[i] = mean if reference == "mean" else transit
        x = new
        nu = nu + change
        models.append(x.copy())
    return models


# ---- closed forms -------------------------------------------------------------------------------
def displacement(matrix: Array, k: int, lr: float) -> Array:
    """D_i with y_i - x = -D_i grad f_i(x) after k plain steps.

    One step is e <- (I - lr A) e for e = y - w*, hence y - x = -(I - (I - lr A)^k) (x - w*). As
    I - (I - lr A)^k = lr (I + (I - lr A) + ... + (I - lr A)^(k-1)) A, the sum without the A applies to
    the gradient A (x - w*) = A x - b, and needs no inverse.
    """
    total = np.zeros_like(matrix)
    power = np.eye(len(matrix))
    for _ in range(k):
        total = total + lr * power
        power = power @ (np.eye(len(matrix)) - lr * matrix)
    return total


def fedavg_limit(matrices: Arrays, linear: Arrays, weights: Sequence[float], steps: Sequence[int], lr: float) -> Array:
    """Where FedAvg stands still: the mean displacement sum p_i (I - (I - lr A_i)^K_i) (w - w_i*) is zero."""
    left = np.zeros_like(matrices[0])
    right = np.zeros_like(linear[0])
    for a, b, p, k in zip(matrices, linear, weights, steps, strict=True):
        d = displacement(a, k, lr)
        left = left + p * d @ a
        right = right + p * d @ b
    return np.asarray(np.linalg.solve(left, right), dtype=np.float64)


def fednova_limit(matrices: Arrays, linear: Arrays, weights: Sequence[float], steps: Sequence[int], lr: float) -> Array:
    """Where FedNova with plain steps stands still: as FedAvg, each displacement divided by |a_i| = K_i."""
    left = np.zeros_like(matrices[0])
    right = np.zeros_like(linear[0])
    for a, b, p, k in zip(matrices, linear, weights, steps, strict=True):
        d = displacement(a, k, lr) / k
        left = left + p * d @ a
        right = right + p * d @ b
    return np.asarray(np.linalg.solve(left, right), dtype=np.float64)


def surrogate(matrices: Arrays, linear: Arrays, weights: Sequence[float], steps: Sequence[int]) -> Array:
    """The minimiser of sum p_i K_i f_i: D_i = lr K_i I + O(lr^2), so it is FedAvg's limit as lr falls to zero."""
    left = np.zeros_like(matrices[0])
    right = np.zeros_like(linear[0])
    for a, b, p, k in zip(matrices, linear, weights, steps, strict=True):
        left = left + p * k * a
        right = right + p * k * b
    return np.asarray(np.linalg.solve(left, right), dtype=np.float64)


def optimum(matrices: Arrays, linear: Arrays, weights: Sequence[float]) -> Array:
    """The minimiser of sum p_i f_i: its gradient (sum p_i A_i) w - sum p_i b_i is zero."""
    left = np.zeros_like(matrices[0])
    right = np.zeros_like(linear[0])
    for a, b, p in zip(matrices, linear, weights, strict=True):
        left = left + p * a
        right = right + p * b
    return np.asarray(np.linalg.solve(left, right), dtype=np.float64)
