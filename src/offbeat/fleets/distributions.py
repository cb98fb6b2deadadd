"""Laws of a positive quantity (seconds, Mbit/s, a factor), written as quantile functions.

A law is called with a number in (0, 1), or an array of them, so that a keyed uniform gives a keyed draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from offbeat.errors import ConfigError, in_words, unknown
from offbeat.keys import key, uniform

Array: TypeAlias = NDArray[np.float64]
Draw = TypeVar("Draw", float, Array)

LAST = 1.0 - 2.0**-53  # the largest number that `keys.uniform` gives
WIDEST = 50.0  # a log-normal spread beyond it overflows at the ends
NAMED = 3  # so many bad entries are named, the others counted


class Law(Protocol):
    """A distribution over numbers >= 0."""

    def problems(self, name: str) -> list[str]:
        """What is impossible about its numbers, in sentences that call the quantity `name`."""

    def __call__(self, u: Draw) -> Draw:
        """The quantile function; of the type that was given."""

    @property
    def bound(self) -> float:
        """No draw is larger."""


LawSpec: TypeAlias = float | Mapping[str, Any] | Law


def numeric(value: Any) -> bool:
    """A number; true and false are none."""
    return isinstance(value, Real) and value is not True and value is not False


def number_problems(name: str, value: Any, least: float = 0.0, positive: bool = False) -> list[str]:
    """The sentence on a value that is no finite number >= `least` (or > 0), in a list; empty when it is one.

    >>> number_problems("latency", -1)
    ['latency = -1; it must be a finite number >= 0']
    """
    if numeric(value):
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond all floats
            number = math.inf
        if math.isfinite(number) and (number > 0.0 if positive else number >= least):
            return []
    return [f"{name} = {in_words(value)}; it must be a finite number {'> 0' if positive else f'>= {least:g}'}"]


def shortened(problems: list[str]) -> list[str]:
    """The first few sentences, and a count of the others."""
    return (
        problems if len(problems) <= NAMED else [*problems[:NAMED], f"... and {len(problems) - NAMED} more of the kind"]
    )


@dataclass(frozen=True)
class Constant:
    """Always `value`; a plain number means the same."""

    value: float

    def problems(self, name: str) -> list[str]:
        return number_problems(name, self.value)

    def __call__(self, u: Draw) -> Draw:
        return self.value + 0.0 * u

    @property
    def bound(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Uniform:
    """Anything between `low` and `high`, each as likely as any other."""

    low: float
    high: float

    def problems(self, name: str) -> list[str]:
        problems = number_problems(f"{name}: low", self.low) + number_problems(f"{name}: high", self.high)
        if not problems and self.low > self.high:
            problems.append(f"{name}: low = {self.low} is above high = {self.high}; swap them")
        return problems

    def __call__(self, u: Draw) -> Draw:
        return self.low + (self.high - self.low) * u

    @property
    def bound(self) -> float:
        return self(LAST)


@dataclass(frozen=True)
class LogNormal:
    """`median * exp(sigma * z)` with z standard normal; its mean is `median * exp(sigma**2 / 2)`."""

    median: float
    sigma: float

    def problems(self, name: str) -> list[str]:
        problems = number_problems(f"{name}: median", self.median, positive=True) + number_problems(
            f"{name}: sigma", self.sigma
        )
        if not problems and self.sigma > WIDEST:
            problems.append(f"{name}: sigma = {self.sigma}; a spread above {WIDEST:g} gives numbers too large to hold")
        return problems

    def __call__(self, u: Draw) -> Draw:
        if isinstance(u, float):
            return self.median * math.exp(self.sigma * float(ndtri(u)))
        factors: Array = np.exp(self.sigma * ndtri(u))
        return self.median * factors

    @property
    def bound(self) -> float:
        return self(LAST)


@dataclass(frozen=True)
class Exponential:
    """Exponential with this `mean`: many small values, a few very large ones."""

    mean: float

    def problems(self, name: str) -> list[str]:
        return number_problems(f"{name}: mean", self.mean, positive=True)

    def __call__(self, u: Draw) -> Draw:
        if isinstance(u, float):
            return -self.mean * math.log1p(-u)
        return -self.mean * np.log1p(-u)

    @property
    def bound(self) -> float:
        return self(LAST)


@dataclass(frozen=True)
class Trace:
    """One of the recorded values, each as likely as any other; they are taken in the order of recording."""

    values: tuple[float, ...]

    def problems(self, name: str) -> list[str]:
        values: Any = self.values  # as it comes from a file
        if not isinstance(values, tuple):
            return [f"{name}: values = {in_words(values)}; they must be a list of numbers"]
        if not values:
            return [f"{name}: the trace is empty; it needs at least one value"]
        problems: list[str] = []
        for index, value in enumerate(values):
            if value is None:
                problems.append(f"{name}: entry {index} of the trace is missing; leave it out or give a number >= 0")
            else:
                problems += number_problems(f"{name}: entry {index} of the trace", value)
        return shortened(problems)

    def __call__(self, u: Draw) -> Draw:
        last = len(self.values) - 1  # u * size may round up to the size itself
        if isinstance(u, float):
            return float(self.values[min(int(u * (last + 1)), last)])
        chosen = np.minimum((u * (last + 1)).astype(np.int64), last)
        return np.asarray(self.values, dtype=np.float64)[chosen]

    @property
    def bound(self) -> float:
        return float(max(self.values))


LAWS: dict[str, Any] = {
    "constant": Constant,
    "exponential": Exponential,
    "lognormal": LogNormal,
    "trace": Trace,
    "uniform": Uniform,
}


def law(spec: Any, name: str = "law") -> Law:
    """Read a law: a number is a constant, a table names its law; `name` is what problems call it.

    >>> law({"law": "uniform", "low": 1, "high": 5})
    Uniform(low=1, high=5)
    """
    result: Law
    if isinstance(spec, Mapping):
        result = tabled(spec, name)
    elif callable(spec):
        result = spec
    elif numeric(spec):
        result = Constant(float(spec))
    else:
        raise ConfigError(
            [f'{name} = {in_words(spec)}; give a number, or a table such as {{law = "uniform", low = 1, high = 5}}']
        )
    problems = result.problems(name)
    if problems:
        raise ConfigError(problems)
    return result


def tabled(spec: Mapping[str, Any], name: str) -> Law:
    """The law that a table describes, its keys checked and its values not."""
    kind = spec.get("law")
    if not isinstance(kind, str) or kind not in LAWS:
        if kind is None:
            raise ConfigError([f"{name}: the table has no key 'law'; known laws: {', '.join(LAWS)}"])
        raise ConfigError([unknown(f"law of {name}", str(kind), LAWS)])
    wanted = [field.name for field in fields(LAWS[kind])]
    given = {option: value for option, value in spec.items() if option != "law"}
    problems = [unknown(f"key of {name} (law '{kind}')", option, wanted) for option in given if option not in wanted]
    problems += [f"{name}: the law '{kind}' needs the key '{option}'" for option in wanted if option not in given]
    if problems:
        raise ConfigError(problems)
    result: Law = LAWS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    return result


def read(spec: Any, name: str, problems: list[str]) -> Law:
    """`law`, but its problems go into `found`, so that those of several laws are named together."""
    try:
        return law(spec, name)
    except ConfigError as error:
        problems.extend(error.problems)
        return Constant(1.0)


def drawn(what: Law, clients: int, seed: int, purpose: str) -> Array:
    """One value per client, keyed by (seed, purpose, client)."""
    return what(draws(clients, seed, purpose))


def draws(clients: int, seed: int, purpose: str) -> Array:
    """One uniform number in (0, 1) per client, keyed by (seed, purpose, client)."""
    result: Array = uniform(key(seed, purpose, np.arange(clients, dtype=np.int64)))
    return result
