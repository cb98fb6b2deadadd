"""How gradients change: L_h, L_g and L-tilde of the FedAvg paper, along the path of training and by power iteration.

The path estimators are those of its appendix C. They look at the points that training visits, so they are lower
estimates of the suprema in Assumptions 3.1, 4.1 and 4.2. Power iteration finds those suprema at one point, among small
moves from it: for quadratics they are the constants themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.keys import generator
from offbeat.theory.gauge import Gauge


@dataclass
class Path:
    """Ratios seen along some rounds of FedAvg, one entry a round."""

    heterogeneity: list[float] = field(default_factory=list)  # L_h^2
    smoothness: list[float] = field(default_factory=list)  # L-tilde: the largest of the clients
    global_smoothness: list[float] = field(default_factory=list)  # L_g


def path(gauge: Gauge, x: Tensor, rounds: int, steps: int, lr: float, server_lr: float = 1.0) -> Path:
    """Appendix C along rounds of FedAvg from x, each of `steps` local steps by every client to its x_i:

    L_h^2 = |grad f(xbar) - mean_i grad F_i(x_i)|^2 / mean_i |x_i - xbar|^2,   xbar the mean of the x_i;
    L-tilde = max_i |grad F_i(x) - grad F_i(x_i)| / |x - x_i|,   x the model of the round.

    The paper calls "the global model" both what a round starts from and the mean: Assumption 4.2 is about the mean.
    L_g is taken along as many steps of gradient descent on f, so it does not depend on who has which samples.
    """
    constants = Path()
    y, slope = x, gauge.gradient(x)
    for number in range(rounds):
        walk = Round(gauge, x, steps, lr)
        constants.heterogeneity.append(walk.heterogeneity())
        constants.smoothness.append(walk.smoothness)
        x = x - server_lr * walk.moved
        after = y - lr * slope
        new = gauge.gradient(after)
        constants.global_smoothness.append(ratio(new - slope, after - y, f"step {number} of gradient descent"))
        y, slope = after, new
    return constants


class Round:
    """One round of FedAvg, looked at client by client; only sums are kept."""

    def __init__(self, gauge: Gauge, x: Tensor, steps: int, lr: float) -> None:
        self.gauge, self.x = gauge, x
        self.moved, self.pull = torch.zeros_like(x), torch.zeros_like(x)  # means of x - x_i and of grad F_i(x_i)
        self.smoothness = squares = 0.0
        for clients in gauge.groups():
            there = gauge.walked(x, clients, steps, lr)
            gradients, before = gauge.gradients(there, clients), gauge.gradients(x, clients)
            far = (x - there).norm(dim=1)
            bent = (gradients - before).norm(dim=1)
            self.smoothness = max(self.smoothness, float(torch.where(far > 0, bent / far, 0.0).max()))
            squares += float((x - there).square().sum())
            self.moved += (x - there).sum(0) / gauge.clients
            self.pull += gradients.sum(0) / gauge.clients
        gauge.job += 1
        if not math.isfinite(squares) or not self.pull.isfinite().all():
            raise ConfigError([f"the path diverged within {steps} local steps of rate {lr:g}; give a lower rate"])
        self.apart = squares / gauge.clients - float(self.moved.square().sum())  # mean_i |x_i - xbar|^2

    def heterogeneity(self) -> float:
        scale = float(self.moved.square().sum())
        if self.apart <= 1e-12 * scale or not self.apart:
            raise ConfigError(
                [
                    "all clients stand at the same place after their local steps, so L_h would be 0 / 0; clients that "
                    "have the same data need no meter of how they differ, others a larger rate or more local steps"
                ]
            )
        bent = self.gauge.gradient(self.x - self.moved) - self.pull
        return float(bent.square().sum()) / self.apart


def ratio(bent: Tensor, moved: Tensor, where: str) -> float:
    length = float(moved.norm())
    if not math.isfinite(length) or not bent.isfinite().all():
        raise ConfigError([f"{where} led to numbers that are not finite; give a lower rate"])
    if length == 0.0:
        raise ConfigError([f"{where} did not move: the gradient there is 0, so L_g would be 0 / 0; start elsewhere"])
    return float(bent.norm()) / length


# ---- power iteration ------------------------------------------------------------------------------
class Power(NamedTuple):
    """What power iteration came to: it grows towards the constant and, but for rounding, never passes it."""

    value: float
    iterations: int
    settled: bool


LEAST = 10  # steps before a residual is believed: a direction that the start hardly has needs some to show itself


def norms(
    apply: Callable[[Tensor, Tensor], Tensor], v: Tensor, iterations: int, tolerance: float
) -> tuple[Tensor, int, bool]:
    """The spectral norm of each of n symmetric operators, from directions `v [n, d]`: their values `[n]`, the steps of
    the slowest, and whether all settled. `apply(rows, v)` gives the images of `v` under the operators `rows`.

    Power iteration that remembers all it has seen (Lanczos 1950): the largest |eigenvalue| of the tridiagonal matrix T
    that the steps fill. Plain power iteration seems to stand still while a large eigenvalue grows out of many small
    ones. Here an operator has settled when its own residual |A y - theta y| is below `tolerance` theta: no operator
    waits for another or ends with it, so values do not depend on who is in the group.
    """
    rows = torch.arange(len(v), device=v.device)
    now, before = v / v.norm(dim=1, keepdim=True), torch.zeros_like(v)
    side = torch.zeros(len(v), 1, dtype=v.dtype, device=v.device)
    diagonal: list[Tensor] = []  # of T, in float64, a column for each step; rows are those still at work
    beside: list[Tensor] = []
    values = torch.zeros(len(v), dtype=torch.float64)
    rounding = torch.finfo(v.dtype).eps
    for number in range(1, iterations + 1):
        image = apply(rows, now) - side * before
        along = (image * now).sum(1, keepdim=True)
        image = image - along * now
        side = image.norm(dim=1, keepdim=True)
        diagonal.append(along[:, 0].double().cpu())
        beside.append(side[:, 0].double().cpu())
        if not (diagonal[-1].isfinite() & beside[-1].isfinite()).all():
            raise ConfigError(["the curvature at this model is not finite; measure at an earlier or better model"])
        theta, last = largest(diagonal, beside[:-1])
        values[rows.cpu()] = theta
        residual = beside[-1] * last
        enough = number >= min(LEAST, v.shape[1])
        done = (residual <= tolerance * theta) & enough
        done |= beside[-1] <= 16 * rounding * theta  # all that the start can reach has been seen
        keep = ~done
        if not keep.any():
            return values, number, True
        there = keep.to(v.device)
        diagonal, beside = [c[keep] for c in diagonal], [c[keep] for c in beside]
        rows, side = rows[there], side[there]
        before, now = now[there], image[there] / side
    return values, iterations, False


def largest(diagonal: list[Tensor], beside: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest |eigenvalue| of each tridiagonal matrix, and the last entry of its vector, without sign."""
    matrices = torch.diag_embed(torch.stack(diagonal, 1))
    if beside:
        off = torch.diag_embed(torch.stack(beside, 1), offset=1)
        matrices = matrices + off + off.mT
    values, vectors = torch.linalg.eigh(matrices)
    place = values.abs().argmax(1)
    each = torch.arange(len(values))
    return values.abs()[each, place], vectors[each, -1, place].abs()


def grown(apply: Callable[[Tensor], Tensor], v: Tensor, iterations: int, tolerance: float) -> Power:
    """The spectral norm of one symmetric operator."""
    values, number, settled = norms(lambda _, rows: apply(rows[0])[None], v[None], iterations, tolerance)
    return Power(float(values[0]), number, settled)


def start(gauge: Gauge, x: Tensor) -> Tensor:
    """A random direction, keyed by the gauge's seed."""
    draw = torch.Generator().manual_seed(generator(gauge.seed, "power").getrandbits(62))
    return torch.randn(len(x), generator=draw, dtype=torch.float64).to(x.dtype).to(x.device)


def global_smoothness(gauge: Gauge, x: Tensor, iterations: int = 100, tolerance: float = 1e-6) -> Power:
    """L_g at x: the spectral norm of the mean Hessian."""
    return grown(lambda v: gauge.product(x, v), start(gauge, x), iterations, tolerance)


def heterogeneity(gauge: Gauge, x: Tensor, iterations: int = 100, tolerance: float = 1e-6) -> Power:
    """L_h at x: the supremum of Assumption 4.2 over small moves, sqrt of the largest eigenvalue of mean_i (H_i - H)^2.

    With u_i = (H_i - H) v the u_i sum to zero, so sum_i (H_i - H) u_i = sum_i H_i u_i: two products a client and step.
    """

    def apply(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        if gauge.limit >= gauge.clients:  # all products fit, and are computed once
            (everyone,) = gauge.groups()
            bent = gauge.products(x, v, everyone)
            return gauge.products(x, bent - bent.mean(0), everyone).mean(0)
        mean = gauge.product(x, v)
        for clients in gauge.groups():
            total += gauge.products(x, gauge.products(x, v, clients) - mean, clients).sum(0)
        return total / gauge.clients

    power = grown(apply, start(gauge, x), iterations, tolerance)
    return power._replace(value=math.sqrt(power.value))


def smoothness(gauge: Gauge, x: Tensor, iterations: int = 100, tolerance: float = 1e-6) -> Power:
    """L-tilde at x: the largest spectral norm of the clients' Hessians. Each client goes on until it has settled."""
    powers = []
    for clients in gauge.groups():
        v = start(gauge, x).expand(len(clients), -1)

        def apply(rows: Tensor, v: Tensor, clients: Tensor = clients) -> Tensor:
            return gauge.products(x, v, clients[rows])

        values, number, settled = norms(apply, v, iterations, tolerance)
        powers.append(Power(float(values.max()), number, settled))
    return Power(max(p.value for p in powers), max(p.iterations for p in powers), all(p.settled for p in powers))


def convexity(gauge: Gauge, x: Tensor, above: float, iterations: int = 100, tolerance: float = 1e-6) -> Power:
    """mu at x: the least eigenvalue of any client's Hessian, by the spectral norm of `above` I - H_i, where `above` is
    at least every |eigenvalue|. It falls towards the constant; negative where a client is not convex here."""
    powers = []
    for clients in gauge.groups():
        v = start(gauge, x).expand(len(clients), -1)

        def apply(rows: Tensor, v: Tensor, clients: Tensor = clients) -> Tensor:
            return above * v - gauge.products(x, v, clients[rows])

        values, number, settled = norms(apply, v, iterations, tolerance)
        powers.append(Power(above - float(values.max()), number, settled))
    return Power(min(p.value for p in powers), max(p.iterations for p in powers), all(p.settled for p in powers))


def bend(gauge: Gauge, x: Tensor) -> float:
    """How far gradients are from affine along a random line through x: 0 for quadratics.

    max_i |g_i(x + d) + g_i(x - d) - 2 g_i(x)| / |g_i(x + d) - g_i(x - d)|, d as long as x, or 1 at the origin."""
    d = start(gauge, x)
    d = d / d.norm() * (float(x.norm()) or 1.0)
    worst = 0.0
    for clients in gauge.groups():
        ahead, behind, here = (gauge.gradients(at, clients) for at in (x + d, x - d, x))
        off, moved = (ahead + behind - 2 * here).norm(dim=1), (ahead - behind).norm(dim=1)
        worst = max(worst, float(torch.where(moved > 0, off / moved, 0.0).max()))
    return worst
