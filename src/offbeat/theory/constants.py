"""The constants of the theorems, one word for one idea; what a theorem asks; and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.errors import ConfigError


@dataclass(frozen=True)
class Constants:
    """What theorems ask of a problem. Squares stand squared; None: not known. Letters as in the five papers."""

    clients: int  # N; n in FedBuff, M in FedaGrac
    gap: float | None = None  # f(x_0) - min f (or a bound of it)
    smoothness: float | None = None  # L, L-tilde: the largest of the f_i
    global_smoothness: float | None = None  # L_g: of the mean f
    heterogeneity: float | None = None  # L_h: Assumption 4.2 of the FedAvg paper
    convexity: float | None = None  # mu: strong convexity
    noise: float | None = None  # sigma^2: E |g_i - grad f_i|^2 of one stochastic gradient, as a method draws it
    divergence: float | None = None  # zeta^2 = max_i sup_x |grad f_i - grad f|^2
    mean_divergence: float | None = None  # mean_i of the same: FedBuff's gamma^2, DLSGD's nu^2
    gradient: float | None = None  # G^2: sup |grad f_i|^2
    dissimilarity: float | None = None  # B^2: as FedaGrac defines it
    inside: float | None = None  # mean over clusters of eps_k^2 (HL-SGD, Assumption 4)
    between: float | None = None  # eps_g^2 (HL-SGD, Assumption 5) ...
    between_factor: float | None = None  # ... and its alpha
    mixing: float | None = None  # rho_max
    clusters: int | None = None  # K
    client_losses: tuple[float, ...] | None = None  # F_i where it was measured: the F_i(x_*) near convergence
    quadratic: bool | None = None  # whether gradients are affine


@dataclass(frozen=True)
class Plan:
    """How a method is to be run: what a theorem's conditions speak of."""

    local_steps: int = 1  # K, Q, I, tau; of FedaGrac the mean of the K_i
    cohort: int = 1  # updates in a commit: n, K, M; of HL-SGD devices m that report per cluster
    commits: int = 1  # T, R
    client_lr: float | None = None  # None: what the theorem chooses
    server_lr: float | None = None
    staleness: int = 0  # lambda, tau: the largest
    steps: tuple[int, ...] = ()  # K_i of each client, where they differ
    calibration: float | None = None  # FedaGrac's lambda
    reports: float = 1.0  # HL-SGD's p: of a cluster's devices


class Condition(NamedTuple):
    """One condition of a theorem, held against the numbers."""

    name: str  # its number in the paper, such as "(10)"
    text: str  # the formula
    given: float  # left side
    allowed: float  # right side: given <= allowed, unless `least`
    least: bool = False  # given >= allowed is asked instead

    @property
    def holds(self) -> bool:
        return self.given >= self.allowed if self.least else self.given <= self.allowed


@dataclass(frozen=True)
class Advice:
    """What a theorem says of a plan on a problem: rates, the bound they give, and the conditions one by one."""

    theorem: str  # "DLSGD, Theorem 1"
    client_lr: float
    server_lr: float
    bound: float | None  # on the quantity named below; None where the paper gives an order without constants
    bounded: str  # "mean of E |grad f(w_t)|^2 over t < T"
    conditions: tuple[Condition, ...]
    notes: tuple[str, ...] = ()

    @property
    def failing(self) -> list[Condition]:
        return [condition for condition in self.conditions if not condition.holds]


class Rates(NamedTuple):
    """What a client and the server multiply their steps by."""

    client: float
    server: float

    @property
    def product(self) -> float:
        return self.client * self.server


def known(constants: Constants, plan: Plan, *names: str) -> list[float]:
    """The constants of these names; a ConfigError names all that are missing or that no theorem can be asked about."""
    values = {name: getattr(constants, name) for name in names}
    missing = [name for name, value in values.items() if value is None]
    problems = [f"not known: {', '.join(missing)}; the theorem needs them, or bounds of them"] if missing else []
    for name, value in values.items():
        above = name in ("smoothness", "global_smoothness")
        if value is not None and not (0 <= value < math.inf and (value or not above)):
            problems.append(f"{name} = {value}; it must be a finite number {'above' if above else 'from'} 0")
    counts = {"clients": constants.clients, "local_steps": plan.local_steps, "cohort": plan.cohort}
    for name, count in {**counts, "commits": plan.commits, "staleness": plan.staleness + 1}.items():
        if count < 1:
            problems.append(f"{name} = {count - (name == 'staleness')}; that is too few")
    for name, rate in (("client_lr", plan.client_lr), ("server_lr", plan.server_lr)):
        if rate is not None and not 0 < rate < math.inf:
            problems.append(f"{name} = {rate}; it must be a finite number above 0, or None")
    if problems:
        raise ConfigError(problems)
    return list(values.values())


def over(a: float, b: float) -> float:
    """a / b, and its limit where b is 0: a term that sets no bound; 0 of nothing is 0."""
    return a / b if b else math.inf if a else 0.0


def rates_of(plan: Plan, chosen: Rates) -> Rates:
    """The plan's rates; where it has none, the theorem's choice, if that is one."""
    client = chosen.client if plan.client_lr is None else plan.client_lr
    server = chosen.server if plan.server_lr is None else plan.server_lr
    wrong = {name: r for name, r in (("client_lr", client), ("server_lr", server)) if not 0 < r < math.inf}
    if wrong:
        raise ConfigError(
            [f"{name}: a constant is 0, so the choice comes to {r}; give a rate" for name, r in wrong.items()]
        )
    return Rates(client, server)
