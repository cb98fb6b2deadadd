"""Quadratic clients with known everything: f_i(w) = 1/2 w' A_i w - b_i' w.

Each sample is one `(A, b)`; a client with a single sample has exact gradients, one with several has noise that
averages to its own quadratic. The mean of the clients is minimised at `optimum`. A `Family` of them knows the
constants that theorems ask for, in closed form; `alike`, `opposed`, `nonconvex` and `regressions` build some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.errors import ConfigError
from offbeat.tasks.task import Task


class Quadratic(nn.Module):
    """The value of a sample's quadratic at the parameter vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, sample: Tensor) -> Tensor:
        d = self.w.shape[-1]
        a = sample[..., : d * d].reshape(*sample.shape[:-1], d, d)
        b = sample[..., d * d :]
        return 0.5 * ((a @ self.w) * self.w).sum(-1) - (b * self.w).sum(-1)


def value(outputs: Tensor, targets: Tensor) -> Tensor:
    """The 'loss' of a quadratic is its value; targets are not used."""
    return outputs.mean()


def quadratic(
    matrices: Sequence[np.ndarray],
    linear: Sequence[np.ndarray],
    start: np.ndarray | None = None,
    noise: float = 0.0,
    samples: int = 1,
    seed: int = 0,
) -> Task:
    """One client per `(A_i, b_i)`; with `noise` each has `samples` copies whose b is off by noise that sums to zero."""
    d = len(linear[0])
    if any(a.shape != (d, d) for a in matrices) or len(matrices) != len(linear):
        raise ConfigError([f"quadratic: give as many {d} x {d} matrices as vectors of length {d}"])
    rng = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    shards = []
    for a, b in zip(matrices, linear, strict=True):
        off = noise * rng.standard_normal((samples, d))
        off -= off.mean(axis=0)
        shards.append(np.arange(len(rows), len(rows) + samples))
        rows += [np.concatenate([a.ravel(), b + o]) for o in off]
    x = torch.tensor(np.array(rows), dtype=torch.float64)
    model = Quadratic(torch.tensor(np.zeros(d) if start is None else start, dtype=torch.float64))
    return Task(model, value, (x, torch.zeros(len(x))), shards, batch_size=1, name="quadratic")


def optimum(matrices: Sequence[np.ndarray], linear: Sequence[np.ndarray]) -> np.ndarray:
    """Where the mean of the clients is least: (sum A_i) w = sum b_i."""
    result: np.ndarray = np.linalg.solve(sum(matrices), sum(linear))
    return result


def random_quadratic(
    clients: int = 10, dimension: int = 5, spread: float = 1.0, noise: float = 0.0, seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Positive definite A_i with eigenvalues in [1/2, 2] about a common mean, and b_i that differ by `spread`."""
    rng = np.random.default_rng([seed, 7])
    matrices, linear = [], []
    for _ in range(clients):
        q, _ = np.linalg.qr(rng.standard_normal((dimension, dimension)))
        matrices.append(q @ np.diag(rng.uniform(0.5, 2.0, dimension)) @ q.T)
        linear.append(spread * rng.standard_normal(dimension))
    return matrices, linear


# ---- families with known constants --------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Family:
    """Clients f_i(w) = 1/2 w' A_i w - b_i' w with symmetric A_i, f their mean, and the constants of the theorems.

    Names are those of `offbeat.theory.constants.Constants`; squares stand squared. L-tilde, L_g, L_h and mu hold
    everywhere. What a method takes `w` holds at that point: for unequal A_i it has no bound over all points.
    """

    matrices: Sequence[np.ndarray]
    linear: Sequence[np.ndarray]

    def __post_init__(self) -> None:
        d = len(self.linear[0]) if len(self.linear) else 0
        if len(self.matrices) != len(self.linear) or any(np.shape(a) != (d, d) for a in self.matrices) or not d:
            raise ConfigError([f"a family needs as many {d} x {d} matrices as vectors of length {d}, at least one."])
        if not all(np.allclose(a, np.transpose(a)) for a in self.matrices):
            raise ConfigError(["a family needs symmetric matrices; give (A + A') / 2, which has the same values."])

    @property
    def clients(self) -> int:
        return len(self.linear)

    @property
    def hessian(self) -> np.ndarray:
        """A, the mean of the A_i."""
        return np.asarray(np.mean(self.matrices, axis=0))

    @property
    def deviations(self) -> np.ndarray:
        """A_i - A, clients first."""
        apart = np.asarray(self.matrices) - self.matrices[0]  # from the first, so that equal A_i give 0 exactly
        return np.asarray(apart - apart.mean(axis=0))

    @property
    def smoothness(self) -> float:
        """L-tilde = max_i |lambda(A_i)|."""
        return _radius(np.asarray(self.matrices))

    @property
    def global_smoothness(self) -> float:
        """L_g = |lambda(A)|."""
        return _radius(self.hessian)

    @property
    def heterogeneity(self) -> float:
        """The least L_h of Assumption 4.2 (FedAvg on heterogeneity): sqrt of lambda_max of mean_i (A_i - A)^2.

        It is reached where x_i - x_bar = (A_i - A) v, v the eigenvector; these add up to 0, as they must.
        """
        stacked = self.deviations.reshape(-1, len(self.linear[0]))
        return float(np.linalg.norm(stacked, 2)) / math.sqrt(self.clients)

    @property
    def heterogeneity_bound(self) -> float:
        """L_h as Proposition 5.2 there has it: 2 max_i |lambda(A_i - A)|. At least twice the least one."""
        return 2 * _radius(self.deviations)

    @property
    def convexity(self) -> float:
        """mu: the least eigenvalue of A; below 0 where f is not convex."""
        return float(np.linalg.eigvalsh(self.hessian)[0])

    def value(self, w: np.ndarray) -> float:
        """f(w)."""
        return float(0.5 * w @ self.hessian @ w - np.mean(self.linear, axis=0) @ w)

    def gap(self, w: np.ndarray) -> float:
        """f(w) - min f; infinite unless mu > 0."""
        if self.convexity <= 0:
            return math.inf
        away = w - optimum(self.matrices, self.linear)
        return float(0.5 * away @ self.hessian @ away)

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """grad f_i(w) = A_i w - b_i, one row for each client."""
        return np.asarray(np.asarray(self.matrices) @ w - np.asarray(self.linear))

    def gradient(self, w: np.ndarray) -> float:
        """G^2 = max_i |grad f_i(w)|^2."""
        return float(_squares(self.gradients(w)).max())

    def global_gradient(self, w: np.ndarray) -> float:
        """|grad f(w)|^2."""
        return float(_squares(self.gradients(w).mean(axis=0)))

    def divergence(self, w: np.ndarray) -> float:
        """zeta^2 = max_i |grad f_i(w) - grad f(w)|^2."""
        return float(self._apart(w).max())

    def mean_divergence(self, w: np.ndarray) -> float:
        """mean_i |grad f_i(w) - grad f(w)|^2."""
        return float(self._apart(w).mean())

    def dissimilarity(self, w: np.ndarray) -> float:
        """B^2 of FedaGrac's Assumption 4, clients of equal weight: max_i |grad f_i(w)|^2 / |grad f(w)|^2.

        At least 1, as there; infinite where only the mean gradient is 0.
        """
        most, mean = self.gradient(w), self.global_gradient(w)
        return most / mean if mean > 0 else (math.inf if most > 0 else 1.0)

    def task(self, start: np.ndarray | None = None, noise: float = 0.0, samples: int = 1, seed: int = 0) -> Task:
        """These clients as a task; see `quadratic`."""
        return quadratic(self.matrices, self.linear, start, noise, samples, seed)

    def _apart(self, w: np.ndarray) -> np.ndarray:
        gradients = self.gradients(w)
        return _squares(gradients - gradients.mean(axis=0))


def noise_of(task: Task) -> np.ndarray:
    """E |g_i - grad f_i|^2 of each client of `quadratic(...)`, exactly and at every point; sigma^2 is the largest.

    It is that of one sample: a batch of s drawn with replacement has this over s.
    """
    rows, d = task.training[0].double().numpy(), len(task.model.w)  # type: ignore[arg-type]
    own = (rows[shard][:, d * d :] for shard in task.shards)
    return np.array([_squares(off - off.mean(axis=0)).mean() for off in (b - b[0] for b in own)])


def alike(
    clients: int = 10, dimension: int = 5, spread: float = 1.0, low: float = 0.5, high: float = 2.0, seed: int = 0
) -> Family:
    """Equal A_i: L_h = 0, while zeta = `spread` at every point. A as in `opposed`."""
    return opposed(clients, dimension, 0.0, spread, low, high, seed)


def opposed(
    clients: int = 10,
    dimension: int = 5,
    heterogeneity: float = 1.0,
    spread: float = 1.0,
    low: float = 0.5,
    high: float = 2.0,
    seed: int = 0,
) -> Family:
    """A_i = A + s_i H with sum s_i = 0: the least L_h is `heterogeneity`, and zeta = `spread` at w = 0.

    Eigenvalues of A go from `low` to `high`, which are among them: mu = low, below 0 if you like, and L_g is the larger
    of |low| and |high|. Those of H go from -L_h to L_h, so with a large L_h clients are not convex, whatever mu. s_i
    are +1 and -1 in turn; of an odd number they are sqrt(m / k), k times, and -sqrt(k / m), m times, with k = m + 1.
    """
    _refuse(clients, dimension, heterogeneity, spread, low, high)
    rng = np.random.default_rng([seed, 8])
    a = _symmetric(rng, dimension, low, high)
    h = _symmetric(rng, dimension, -heterogeneity, heterogeneity)
    b, off = rng.standard_normal(dimension), rng.standard_normal((clients, dimension))
    off -= off.mean(axis=0)
    most = math.sqrt(_squares(off).max())
    off *= spread / most if most > 0 else 0.0
    return Family([a + s * h for s in _signs(clients)], list(b + off))


def nonconvex(
    clients: int = 10, dimension: int = 5, spread: float = 1.0, low: float = 0.5, high: float = 2.0, seed: int = 0
) -> Family:
    """`opposed` with L_h so large that every A_i is indefinite; f itself is convex or not, by the sign of `low`."""
    if clients < 2 or dimension < 2:
        raise ConfigError([f"nonconvex: {clients} clients in {dimension} dimensions; give at least 2 of both."])
    heterogeneity = 1.25 * max(abs(low), abs(high)) / float(np.abs(_signs(clients)).min())
    return opposed(clients, dimension, heterogeneity, spread, low, high, seed)


def regressions(clients: int = 10, dimension: int = 100, unit: bool = True, seed: int = 0) -> Family:
    """f_i(w) = 1/2 |U w - v_i|^2 with one U for all, less the constant 1/2 |v_i|^2: L_h = 0.

    Table 3 of the FedAvg paper on heterogeneity: U is 100 x 100, "each column of U and v_i are sampled from a normal
    distribution N(0, I)". It does not say how many workers there are (for MNIST 10), where they start or what noise
    there is. The mean of 1/2 |U w - v_i|^2 is never far below 45, and its target is 0.8; `gap` from w = 0 gets there
    with one step of 0.005 a round: with `unit`, columns of U scaled to length 1, in 500 to 3,800 rounds by the
    seed (1,400 in the middle; the paper has 927), and with columns as drawn in 6 to 40, where 0.005 is not too large.
    """
    rng = np.random.default_rng([seed, 9])
    u, v = rng.standard_normal((dimension, dimension)), rng.standard_normal((clients, dimension))
    if unit:
        u /= np.linalg.norm(u, axis=0)
    return Family([u.T @ u] * clients, list(v @ u))


def _radius(matrices: np.ndarray) -> float:
    """The largest absolute eigenvalue."""
    return float(np.abs(np.linalg.eigvalsh(matrices)).max())


def _squares(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(np.square(vectors).sum(axis=-1))


def _symmetric(rng: np.random.Generator, dimension: int, low: float, high: float) -> np.ndarray:
    """Random axes; eigenvalues drawn from low to high, both of them included (in one dimension: high)."""
    q, _ = np.linalg.qr(rng.standard_normal((dimension, dimension)))
    eigenvalues = rng.uniform(low, high, dimension)
    eigenvalues[0], eigenvalues[-1] = low, high
    a = q @ np.diag(eigenvalues) @ q.T
    return np.asarray((a + a.T) / 2)


def _signs(clients: int) -> np.ndarray:
    """Numbers of both signs in turn with sum 0 and mean square 1; of one client 0."""
    plus, minus = (clients + 1) // 2, clients // 2
    below = -math.sqrt(plus / minus) if minus else 0.0
    return np.where(np.arange(clients) % 2 == 0, math.sqrt(minus / plus), below)


def _refuse(clients: int, dimension: int, heterogeneity: float, spread: float, low: float, high: float) -> None:
    counts = (("clients", clients), ("dimension", dimension))
    problems = [f"{what} is {count}; give a whole number of at least 1." for what, count in counts if count < 1]
    for what, size in (("heterogeneity", heterogeneity), ("spread", spread)):
        if size < 0:
            problems.append(f"{what} is {size}; give 0 or more.")
        if size > 0 and clients == 1:
            problems.append(f"{what} is {size}, but one client does not differ from itself; give 0, or more clients.")
    if low > high:
        problems.append(f"low is {low} and high is {high}; give eigenvalues in their order.")
    if problems:
        raise ConfigError(problems)
