"""The account of a run, kept from its trace rows alone: what was spent, by whom, and how stale updates were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.records import Arrived, Begun, Finished, JobName, Joined, Left, Offer, Overwritten, Row, Start

SUMS = (
    "time", "commits", "client_steps", "samples", "bytes_up", "bytes_down", "bytes_d2d", "jobs_started",
    "jobs_finished", "jobs_dead", "busy_seconds", "away_seconds", "offers",
)  # fmt: skip


@dataclass(frozen=True)
class Crowd:
    """Clusters that report as one: what stands behind a row of the trace that speaks of one of them."""

    members: Sequence[Sequence[int]]  # clients
    behind: Callable[[int, int], Sequence[int]]  # cluster, job -> clients whose models are in its report
    reports: Sequence[int]  # updates that each cluster sends
    exchanged: Callable[[int, int, int], float]  # cluster, job, steps -> bytes between its devices
    computing: Callable[[int, int, int], float]  # cluster, job, steps -> seconds that its devices compute, all told
    server: bool = True  # models go to and from the server


@dataclass
class Account:
    """Sums over the rows seen so far. Steps and samples count when a client has computed them, used or not;
    bytes down when they are sent (a broadcast to every client that is there), bytes up when they arrive; bytes between
    devices (d2d) when a job is done."""

    clients: int
    samples_per_step: list[int]
    down_bytes: float  # one broadcast state
    up_bytes: float  # one update
    pulls: bool = False  # clients fetch offers one by one instead of getting every broadcast
    time: float = 0.0
    commits: int = 0
    client_steps: int = 0
    samples: int = 0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    bytes_d2d: float = 0.0
    jobs_started: int = 0
    jobs_finished: int = 0
    jobs_dead: int = 0
    busy_seconds: float = 0.0
    away_seconds: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    participation: Counter[int] = field(default_factory=Counter)
    working: dict[int, tuple[float, Begun]] = field(default_factory=dict)
    away: dict[int, float] = field(default_factory=dict)
    offers: bool = False
    looked: Sequence[int] | None = None  # samples that each client's job looks at besides its steps
    each_up: Callable[[Sequence[int], Sequence[int]], Sequence[float]] | None = None  # bytes, where updates differ
    crowd: Crowd | None = None
    client_ids: Sequence[int] | None = None  # of each client in the task as given; None: its own number
    # Steps of updates whose bytes are counted at the commit.
    arrived: dict[JobName, int] = field(default_factory=dict)

    def take(self, rows: list[Row], jobs: tuple[tuple[int, int], ...], staleness: list[int]) -> None:
        """The rows up to one commit, and how stale its updates were."""
        for now, record in rows:
            self.see(now, record)
        self.time = rows[-1][0]
        self.commits += 1
        if self.each_up is not None:
            distinct = dict.fromkeys(jobs)
            steps = [self.arrived.pop(job) for job in distinct]
            self.bytes_up += sum(self.each_up([client for client, _ in distinct], steps))
        self.staleness.update(staleness)
        self.participation.update(client for job in jobs for client in self.reporting(*job))

    def note_prime(self, sizes: Sequence[int], down: float, up: float) -> None:
        """A run that opens with every client's gradient over its shard: bytes of a vector each way."""
        self.samples += sum(sizes)
        self.bytes_down += len(sizes) * down
        self.bytes_up += len(sizes) * up

    def reporting(self, client: int, job: int) -> Sequence[int]:
        return (client,) if self.crowd is None else self.crowd.behind(client, job)

    def copies(self, client: int) -> int:
        """How many times a model goes down to whom a row calls a client."""
        return 1 if self.crowd is None else len(self.crowd.members[client]) * self.crowd.server

    def see(self, now: float, record: Any) -> None:
        kind = type(record)
        if kind is Begun:
            self.jobs_started += 1
            self.bytes_down += self.down_bytes * self.copies(record.client) if self.offers and self.pulls else 0.0
            self.working[record.client] = (now, record)
        elif kind is Finished:
            since, begun = self.working.pop(record.client)
            self.jobs_finished += 1
            if self.crowd is None:
                self.busy_seconds += now - since
                self.client_steps += begun.steps
            else:
                self.busy_seconds += self.crowd.computing(record.client, record.job, begun.steps)
                self.client_steps += begun.steps * len(self.crowd.members[record.client])
                self.bytes_d2d += self.crowd.exchanged(record.client, record.job, begun.steps)
            self.samples += begun.steps * self.samples_per_step[record.client]
            self.samples += self.looked[record.client] if self.looked else 0
        elif kind is Arrived:
            if self.crowd is not None:
                self.bytes_up += self.up_bytes * self.crowd.reports[record.client] * self.crowd.server
            elif self.each_up is None:
                self.bytes_up += self.up_bytes
            else:
                self.arrived[record.client, record.job] = record.steps
        elif kind is Start:
            self.bytes_down += self.down_bytes * self.copies(record.client)
        elif kind is Offer:
            self.offers = True
            self.bytes_down += 0.0 if self.pulls else self.down_bytes * (self.clients - len(self.away))
        elif kind is Overwritten:
            self.jobs_dead += 1
            if record.client in self.working and self.working[record.client][1].job == record.job:
                since, _ = self.working.pop(record.client)
                self.busy_seconds += now - since
        elif kind is Left:
            self.away[record.client] = now
        elif kind is Joined:
            self.away_seconds += now - self.away.pop(record.client, 0.0)
            self.bytes_down += self.down_bytes if self.offers and not self.pulls else 0.0

    def state(self) -> dict[str, Any]:
        """The sums, as JSON can hold them."""
        sums: dict[str, Any] = {name: getattr(self, name) for name in SUMS}
        sums |= {name: [*getattr(self, name).items()] for name in ("staleness", "participation", "away", "arrived")}
        return sums | {"working": [[since, *begun] for since, begun in self.working.values()]}

    def restore(self, sums: Mapping[str, Any]) -> None:
        for name in SUMS:
            setattr(self, name, sums[name])
        self.staleness, self.participation = Counter(dict(sums["staleness"])), Counter(dict(sums["participation"]))
        self.away = dict(sums["away"])
        self.arrived = {tuple(job): steps for job, steps in sums["arrived"]}
        self.working = {client: (since, Begun(client, *rest)) for since, client, *rest in sums["working"]}

    def idle_share(self) -> float:
        """The share of the clients' time (while they are there) in which they do not compute."""
        there = self.clients * self.time - self.away_seconds - sum(self.time - t for t in self.away.values())
        many = [1] * self.clients if self.crowd is None else [len(members) for members in self.crowd.members]
        busy = self.busy_seconds + sum((self.time - since) * many[c] for c, (since, _) in self.working.items())
        return max(0.0, 1 - busy / there) if there > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        updates = sum(self.staleness.values())
        counts = [self.participation[client] for client in range(self.clients)]
        return {
            "commits": self.commits,
            "virtual_seconds": self.time,
            "client_steps": self.client_steps,
            "samples": self.samples,
            "bytes_up": round(self.bytes_up),
            "bytes_down": round(self.bytes_down),
            "bytes_d2d": round(self.bytes_d2d),
            "jobs_started": self.jobs_started,
            "jobs_finished": self.jobs_finished,
            "jobs_dead": self.jobs_dead,
            "updates_consumed": updates,
            "idle_share": self.idle_share(),
            "staleness": {
                "mean": sum(k * n for k, n in self.staleness.items()) / updates if updates else 0.0,
                "max": max(self.staleness, default=0),
                "histogram": {str(k): self.staleness[k] for k in sorted(self.staleness)},
            },
            "participation": {
                "min": min(counts),
                "mean": sum(counts) / len(counts),
                "max": max(counts),
                "never": counts.count(0),
            },
        }
