"""The fleet: what each client's work and transfers take, as arrays; no object per client."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offbeat.config.registry import lacking
from offbeat.errors import ConfigError, in_words
from offbeat.fleets.clusters import Clusters
from offbeat.fleets.distributions import NAMED, Array, Law, number_problems, numeric
from offbeat.fleets.presence import Change, Presence, PresenceOf
from offbeat.fleets.steps import StepPlan, steps_of
from offbeat.keys import fold, key, uniform
from offbeat.schedule.device import OWN_STEPS, Durations

LONGEST = 1e12  # seconds of a step or a transfer: thirty thousand years


@dataclass(frozen=True, eq=False)
class Fleet:
    """All clients. Arrays have one entry per client; a transfer takes latency + bytes / bandwidth."""

    name: str
    clients: int
    step_seconds: Array  # seconds per local step
    down_latency: Array  # seconds
    up_latency: Array
    down_bandwidth: Array  # bytes per second; infinity is allowed
    up_bandwidth: Array
    jitter: Law | None = None  # a factor on each duration, drawn per job and phase; None: exactly 1
    drop_out: float = 0.0  # probability that a job is lost while computing, at a uniform share of its time
    presence: Presence | None = None  # None: always there
    payload_bytes: float | None = None  # bytes of one vector where a paper states them; None: the model's own size
    local_steps: StepPlan | None = None  # steps of a job whose order leaves them to the client; None: 10
    clusters: Clusters | None = None  # who is linked to whom; None: nobody
    notes: tuple[str, ...] = ()  # what a report should say, such as records that were left out

    def kind_problems(self) -> list[str]:
        """What is not of the kind that a field of a fleet is: those made in Python are not checked as they are made."""
        problems = []
        for name in ("clients", "drop_out", "payload_bytes"):
            value: Any = getattr(self, name)
            if not numeric(value) and (name, value) != ("payload_bytes", None):
                problems.append(f"fleet: {name} = {in_words(value)}; it must be a number")
        for name in ("step_seconds", "down_latency", "up_latency", "down_bandwidth", "up_bandwidth"):
            value = getattr(self, name)
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
                problems.append(
                    f"fleet: {name} = {in_words(value)}; it must be a NumPy array of numbers, one for each client"
                )
        parts = {"jitter": Law, "presence": Presence, "local_steps": StepPlan}
        for name, kind in parts.items():
            value = getattr(self, name)
            lacks = lacking(kind, value)
            if value is not None and (lacks or not callable(value)):
                also = f", which has {', '.join(lacks)}" if lacks and callable(value) else ""
                problems.append(f"fleet: {name} = {in_words(value)}; it must be a {kind.__name__} or None{also}")
        value = self.clusters
        if value is not None and not isinstance(value, Clusters):
            problems.append(f"fleet: clusters = {in_words(value)}; it must be Clusters or None")
        return problems

    def problems(self) -> list[str]:
        """Everything that is impossible about it; empty when it can run."""
        problems = self.kind_problems()
        if problems:
            return problems
        problems = [] if self.clients >= 1 else [f"clients = {self.clients}; a fleet needs at least 1"]
        for name in ("step_seconds", "down_latency", "up_latency"):
            problems += self.entries(name, f"s; times are finite and >= 0, and {LONGEST:g} s at most")
        for name in ("down_bandwidth", "up_bandwidth"):
            problems += self.entries(name, "bytes/s; a link must carry more than 0 (infinity is allowed)")
        if self.jitter is not None:
            problems += self.jitter.problems("jitter")
        problems += improbable(self.drop_out)
        if self.presence is not None:
            problems += self.presence.problems(self.clients)
        if self.payload_bytes is not None:
            problems += number_problems("payload_bytes", self.payload_bytes)
        if self.local_steps is not None:
            problems += self.local_steps.problems(self.clients)
        if self.clusters is not None:
            problems += self.clusters.problems(self.clients)
        return problems

    def entries(self, name: str, rule: str) -> list[str]:
        """The sentence on impossible entries of one array, with the first of them."""
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if values.shape != (max(self.clients, 0),):
            return [f"{name}: an array of shape {values.shape} for {self.clients} clients; give one number for each"]
        good = values > 0.0 if name.endswith("bandwidth") else (values >= 0.0) & (values <= LONGEST)
        bad = np.flatnonzero(~good)
        if not len(bad):
            return []
        named = ", ".join(f"client {client} has {values[client]}" for client in bad[:NAMED].tolist())
        more = f", and {len(bad) - NAMED} more," if len(bad) > NAMED else ""
        return [f"{name}: {named}{more} {rule}"]

    def durations(self, seed: int, down_bytes: float, up_bytes: float | Array, looks: Array | None = None) -> Durations:
        """What the clock asks, for transfers of so many bytes (up: perhaps each client its own); a job takes the time
        of `looks` steps more, where clients look through their data besides."""
        problems = number_problems("down_bytes", down_bytes) + number_problems("up_bytes", float(np.max(up_bytes)))
        if problems:
            raise ConfigError(problems)
        kind = SteadyDurations if self.jitter is None else DrawnDurations
        return kind(self, seed, down_bytes, up_bytes, looks)


def without(fleet: Fleet, left_out: Sequence[int]) -> Fleet:
    """The fleet without these clients; the others are numbered anew, in their order, and stay as they are."""
    ids = np.delete(np.arange(fleet.clients), left_out).tolist()
    names = ("step_seconds", "down_latency", "up_latency", "down_bandwidth", "up_bandwidth")
    arrays = {name: getattr(fleet, name)[ids] for name in names}
    presence = None if fleet.presence is None else PresenceOf(fleet.presence, fleet.clients, ids)
    plan = None if fleet.local_steps is None else steps_of(fleet.local_steps, ids)
    return replace(fleet, clients=len(ids), presence=presence, local_steps=plan, **arrays)


def clustered(fleet: Fleet, clusters: Clusters) -> Fleet:
    """The fleet in clusters, each at its pace."""
    steps = fleet.step_seconds.copy()
    for cluster in clusters.each:
        inside = [device for device in cluster.members if 0 <= device < fleet.clients]
        steps[inside] *= cluster.pace
    return replace(fleet, step_seconds=steps, clusters=clusters)


def improbable(drop_out: float) -> list[str]:
    """The sentence on a drop-out that is no probability; with 1, no job would ever come back."""
    good = 0.0 <= drop_out < 1.0
    return [] if good else [f"drop_out = {drop_out}; it is a probability, at least 0 and below 1"]


class SteadyDurations:
    """A fleet's durations in seconds. Asked for every job, so plain floats and no more than needed."""

    __slots__ = (
        "away",
        "clients",
        "down",
        "download_bound",
        "drop_out",
        "jitter",
        "looks",
        "own_steps",
        "roots",
        "steps",
        "up",
    )

    def __init__(
        self, fleet: Fleet, seed: int, down_bytes: float, up_bytes: float | Array, looks: Array | None = None
    ) -> None:
        self.clients = fleet.clients
        self.jitter = fleet.jitter
        self.drop_out = float(fleet.drop_out)
        self.away = fleet.presence
        down = fleet.down_latency + down_bytes / fleet.down_bandwidth
        self.download_bound = float(down.max()) * (1.0 if self.jitter is None else self.jitter.bound)
        for name, seconds in (("download", down), ("upload", fleet.up_latency + up_bytes / fleet.up_bandwidth)):
            if not (seconds <= LONGEST).all():
                client = int(np.argmax(~(seconds <= LONGEST)))
                raise ConfigError(
                    [
                        f"the {name} of client {client} takes {seconds[client]:.3g} s, and {LONGEST:g} s is the most; "
                        "give it a faster link"
                    ]
                )
        self.down = plain(down)
        self.up = plain(fleet.up_latency + up_bytes / fleet.up_bandwidth)
        self.steps = plain(fleet.step_seconds)
        self.own_steps: Callable[[int, int], int] = fleet.local_steps or own_steps
        self.looks = None if looks is None else plain(looks * fleet.step_seconds)
        self.roots: tuple[int, ...] = tuple(key(seed, phase) for phase in ("download", "compute", "upload", "drop"))

    @property
    def steady(self) -> tuple[array[float], array[float], array[float]] | None:
        """Seconds per client for a download, a local step and an upload, where that is all; None where jobs differ."""
        plain = self.jitter is None and self.drop_out == 0.0 and self.looks is None
        return (self.down, self.steps, self.up) if plain else None

    def download(self, client: int, job: int) -> float:
        return self.down[client]

    def compute(self, client: int, job: int, steps: int) -> float:
        return self.steps[client] * steps + (self.looks[client] if self.looks else 0.0)

    def upload(self, client: int, job: int) -> float:
        return self.up[client]

    def fails(self, client: int, job: int) -> float | None:
        if self.drop_out == 0.0:
            return None
        u = self.draw(3, client, job)
        return u / self.drop_out if u < self.drop_out else None  # below p, u / p is uniform again

    def draw(self, phase: int, client: int, job: int) -> float:
        """A uniform number, keyed by (seed, phase, client, job)."""
        number: float = uniform(fold(fold(self.roots[phase], client), job))
        return number

    def presence(self, client: int) -> Iterator[Change] | None:
        return None if self.away is None else self.away(client)

    def opening(self) -> Iterable[tuple[int, bool, float]]:
        if self.away is None:
            return ()
        return zip(range(self.clients), *self.away.opening(self.clients), strict=True)


class DrawnDurations(SteadyDurations):
    """With jitter: each duration times a factor of its own."""

    __slots__ = ()

    def download(self, client: int, job: int) -> float:
        return self.down[client] * self.factor(0, client, job)

    def compute(self, client: int, job: int, steps: int) -> float:
        return super().compute(client, job, steps) * self.factor(1, client, job)

    def upload(self, client: int, job: int) -> float:
        return self.up[client] * self.factor(2, client, job)

    def factor(self, phase: int, client: int, job: int) -> float:
        assert self.jitter is not None
        return self.jitter(self.draw(phase, client, job))


def own_steps(client: int, job: int) -> int:
    """Of a client that may choose, where the fleet has no step law."""
    return OWN_STEPS


def plain(values: Array) -> array[float]:
    """For asking one at a time: a third of a list's memory, and nothing for the garbage collector to visit."""
    return array("d", np.ascontiguousarray(values, dtype=np.float64).tobytes())
