"""Checks on what clients send, with their defaults. What fails is refused, counted, and never reaches the method."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from torch import Tensor

from offbeat.config.options import fits
from offbeat.errors import ConfigError

OFFENCES = ("malformed", "digest", "size", "not finite", "norm", "rate", "foreign")  # of a client, not of its network


@dataclass(frozen=True)
class Limits:
    """What is let in. Numbers of clients and updates are for each client, if it says so."""

    norm: float = 1000.0  # times the model's norm, or 1 if that is less: no vector of an update may be longer
    window: int = 10_000  # versions that an update may be behind
    rate: float = 1200.0  # updates a minute of each client, in the long run ...
    burst: int = 100  # ... and how many at once
    offences: int = 10  # of a client, then it is shut out
    connections: int = 4096  # at once
    memory_mib: float = 1024.0  # updates that wait for their commit in memory; others are read from the disk again
    reserve_mib: float = 64.0  # of the disk stay free: with less, no update is taken

    def problems(self) -> list[str]:
        problems = []
        for each in fields(self):
            value = getattr(self, each.name)
            if not fits(value, float) or not 0 < value < math.inf:
                problems.append(f"limit {each.name} = {value!r}; it must be a positive number")
        return problems

    @staticmethod
    def of(table: Mapping[str, float]) -> Limits:
        known = {each.name for each in fields(Limits)}
        if wrong := [
            f"unknown limit '{name}'; known: {', '.join(sorted(known))}" for name in table if name not in known
        ]:
            raise ConfigError(wrong)
        limits = Limits(**table)  # type: ignore[arg-type]
        if problems := limits.problems():
            raise ConfigError(problems)
        return limits


@dataclass
class Conduct:
    """What is held against one client, and how much it has sent of late."""

    refused: Counter[str] = field(default_factory=Counter)
    shut_out: str = ""
    tokens: float = math.inf
    since: float = 0.0

    @property
    def offences(self) -> int:
        return sum(self.refused[kind] for kind in OFFENCES)


class Checks:
    """The books on all clients."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self.clients: dict[int, Conduct] = {}

    def of(self, client: int) -> Conduct:
        return self.clients.setdefault(client, Conduct())

    def within_rate(self, client: int) -> bool:
        """Takes one update off what a client may send now."""
        one, now = self.of(client), self.clock()
        one.tokens = min(self.limits.burst, one.tokens + (now - one.since) * self.limits.rate / 60.0)
        one.since = now
        if one.tokens < 1.0:
            return False
        one.tokens -= 1.0
        return True

    def refuse(self, client: int, kind: str) -> bool:
        """Count it; whether the client is shut out from now on."""
        one = self.of(client)
        one.refused[kind] += 1
        if kind in OFFENCES and one.offences >= self.limits.offences and not one.shut_out:
            said = ", ".join(f"{many} times {name}" for name, many in one.refused.items() if name in OFFENCES)
            one.shut_out = f"{one.offences} things that it sent were refused: {said}"
            return True
        return False

    def problem(self, update: Mapping[str, Tensor], model: Tensor) -> tuple[str, str] | None:
        """What is wrong with the numbers of an update: a kind and a sentence."""
        size = max(1.0, float(model.norm()))
        for name, vector in update.items():
            norm = float(vector.norm())
            if not math.isfinite(norm) and not bool(vector.isfinite().all()):
                return "not finite", f"'{name}' holds NaN or infinity"
            if vector.dim() and norm > self.limits.norm * size:
                return "norm", (
                    f"'{name}' has the norm {norm:.3g}, more than {self.limits.norm:g} times that of the model "
                    f"({size:.3g})"
                )
        return None

    def totals(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for one in self.clients.values():
            total.update(one.refused)
        return total
