"""The guard: whatever a driver says, a policy hears only what can be, and a restored one is the one that was."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from offbeat import Experiment, run
from offbeat.errors import OffbeatError
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.records import (
    COMMANDS,
    Arrived,
    Begun,
    Commit,
    Drop,
    Fetch,
    Joined,
    Left,
    Offer,
    Row,
    Start,
    WakeAt,
    Woke,
)
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.guard import Guard, away_at_first, feed, nothing_refused, restore
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from worlds import quadratic_world

CLIENTS = 8
POLICIES = [
    Rounds(steps=2, size=4),
    Rounds(steps=2, size=3, replacement=True),
    Rounds(steps=2, size=3, over_selection=2.0, deadline=0.5),
    Rounds(size=3, probes=1),
    Buffer(size=3, steps=2),
    Buffer(size=3, steps=2, concurrency=5),
    Buffer(size=3, restart="fresh"),
    Buffer(size=3, steps=2, restart="fresh", overlap=True),
    Sampled(size=3, steps=2),
    Sampled(size=3, overlap=False),
    Hybrid(Buffer(size=2, steps=2)),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


def rows_of(policy: Any, seed: int, many: int = 700) -> list[Row]:
    """A run with jitter, lost jobs, and clients that come and go."""
    fleet = build(
        "custom", CLIENTS, seed, step_seconds={"law": "uniform", "low": 0.05, "high": 0.4}, latency=0.05,
        jitter={"law": "lognormal", "median": 1.0, "sigma": 0.4}, drop_out=0.1, mean_on=5.0, mean_off=1.0,
    )  # fmt: skip
    clock = VirtualClock(policy, fleet.durations(seed, 0, 0), generator(seed, "policy"))
    assert clock.refused == nothing_refused()
    return list(itertools.islice(clock, many))


def arrival(begun: Begun) -> Arrived:
    return Arrived(*begun[:4])


def noise(rng: random.Random, guard: Guard, past: list[Arrived], lost: list[Begun]) -> tuple[str, Any]:
    """An event that cannot be, and what it should count as."""
    client = rng.randrange(CLIENTS)
    known = [begun for jobs in guard.open.values() for begun in jobs.values()]
    choices: list[tuple[str, Any]] = [
        ("unknown", Arrived(CLIENTS + client, 0, 0, 2)),
        ("unknown", Arrived(-1, 0, 0, 2)),
        ("unknown", Arrived(client, guard.numbers[client] + rng.randrange(3), 0, 2)),
        ("unknown", Woke(10**6)),
        ("unknown", Left(CLIENTS)),
        ("repeated", Left(client) if client in guard.away else Joined(client)),
    ]
    if past:
        choices += [("repeated", rng.choice(past[-8:]))] * 3
    if known:
        begun = rng.choice(known)
        choices += [("unknown", arrival(begun._replace(version=begun.version + 1)))]
        choices += [("unknown", arrival(begun._replace(steps=begun.steps + 1)))]
    if lost:  # dropped, gone with its client, or overwritten
        choices += [("late", arrival(rng.choice(lost)))] * 3
    unasked = [begun for begun in known if guard.policy.holds and begun.client not in guard.asked]
    if unasked:
        choices += [("unknown", arrival(rng.choice(unasked)))]
    return rng.choice(choices)


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_what_is_refused_changes_no_command(policy: Any, seed: int) -> None:
    """A recorded run, told with events among it that cannot be: the commands are those recorded, each is counted."""
    rows, rng = rows_of(policy, seed), random.Random(seed)
    guard = Guard(policy, CLIENTS, generator(seed, "policy"))
    counted, past, begun = nothing_refused(), [], {}
    for _, (now, record) in feed(guard, rows):
        if isinstance(record, Arrived):
            past.append(record)
        elif isinstance(record, Begun):
            begun[record[:2]] = record
        settled = {event[:2] for event in past}
        lost = [job for name, job in begun.items() if name not in guard.jobs() | settled][-8:]
        for _ in range(rng.randrange(3)):
            reason, event = noise(rng, guard, past, lost)
            assert guard.hear(now, event) == []
            counted[reason] += 1
    assert guard.refused == counted
    assert min(counted["repeated"], counted["unknown"]) > 0


class Careless:
    """A driver that delivers in any order: twice, late, after its client has gone, or never."""

    def __init__(self, policy: Any, seed: int) -> None:
        self.rng = random.Random(seed)
        self.guard = Guard(policy, CLIENTS, generator(seed, "policy"))
        self.there = set(range(CLIENTS))
        self.offer: Offer | None = None
        self.orders: list[Start] = []
        self.sent: list[Arrived] = []  # it may be delivered again and again
        self.alarms: list[int] = []
        self.void: set[tuple[int, int]] = set()  # dropped, or of a client that has gone
        self.accepted: set[tuple[int, int]] = set()
        self.used: set[tuple[int, int]] = set()
        self.commits = 0

    def obey(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Start):
                self.orders.append(command)
            elif isinstance(command, Offer):
                self.offer = command
            elif isinstance(command, Drop):
                self.forget(command.client)
            elif isinstance(command, WakeAt):
                self.alarms.append(command.tag)
            elif isinstance(command, Commit):
                assert set(command.jobs) <= self.accepted - self.used - self.void
                self.used |= set(command.jobs)
                self.commits += 1

    def forget(self, client: int) -> None:
        self.void |= {event[:2] for event in self.sent if event.client == client} - self.accepted
        self.orders = [order for order in self.orders if order.client != client or self.rng.random() < 0.5]

    def act(self, now: float) -> None:
        guard, rng = self.guard, self.rng
        what = rng.random()
        if what < 0.04:
            client = rng.randrange(CLIENTS)
            self.obey(guard.left(now, Left(client)))
            self.there.discard(client)
            self.forget(client)
        elif what < 0.12:
            client = rng.randrange(CLIENTS)
            self.there.add(client)
            self.obey(guard.joined(now, Joined(client)))
        elif what < 0.16 and self.alarms:
            self.obey(guard.woke(now, Woke(rng.choice(self.alarms))))
        elif what < 0.55:
            self.start()
        elif self.sent:
            event = rng.choice(self.sent[-12:])
            if rng.random() < 0.1:
                event = event._replace(version=event.version + 1)
            before = dict(guard.refused)
            commands = guard.arrived(now, event)
            if guard.refused == before:
                assert event[:2] not in self.accepted | self.void
                self.accepted.add(event[:2])
            self.obey(commands)

    def start(self) -> None:
        if self.orders:
            client, version, steps = self.orders.pop(self.rng.randrange(len(self.orders)))
        elif self.offer is not None:
            client, (version, steps) = self.rng.randrange(CLIENTS), self.offer
        else:
            return
        begun = Begun(client, self.guard.numbers[client], version, steps or 5, self.guard.steps[client])
        if self.guard.begun(begun):
            assert client in self.there
            self.sent.append(arrival(begun))


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_a_careless_driver_commits_nothing_twice_and_nothing_late(policy: Any, seed: int) -> None:
    driver = Careless(policy, seed)
    driver.obey(driver.guard.begin(0.0, range(CLIENTS)))
    for turn in range(3000):
        driver.act(turn / 10)
    assert driver.commits > 5
    assert min(driver.guard.refused.values()) > 0


@every_policy
@pytest.mark.parametrize("seed", range(2))
def test_a_restored_guard_goes_on_as_the_one_that_was(policy: Any, seed: int) -> None:
    rows = rows_of(policy, seed)
    for cut in (0, 1, 37, 300, 555):
        cut = max(cut, len(away_at_first(rows)))
        guard = restore(policy, CLIENTS, generator(seed, "policy"), rows[:cut])
        said = list(guard.pending)
        for now, record in rows[cut:]:
            said += guard.hear(now, record) if not isinstance(record, COMMANDS) else []
        recorded = [record for _, record in rows[cut:] if isinstance(record, COMMANDS)]
        assert said[: len(recorded)] == recorded
        assert guard.refused == nothing_refused()


def test_a_record_of_what_cannot_be_is_refused() -> None:
    policy = Buffer(size=3, steps=2)
    rows = rows_of(policy, 0)
    place = next(place for place, (_, record) in enumerate(rows) if isinstance(record, Arrived))
    twice = [*rows[: place + 2], rows[place], *rows[place + 2 :]]
    with pytest.raises(OffbeatError, match=r"replay: at row \d+ \(.* s\) the trace has Arrived\(.*\), which cannot be"):
        restore(policy, CLIENTS, generator(0, "policy"), twice)


def test_without_a_guard_they_would_be_committed() -> None:
    """What the guard is for: told twice, a buffer commits twice; after a drop, a round commits what was dropped."""
    buffer = Buffer(size=2, steps=1)
    for conductor, commits in ((buffer.conductor(3, random.Random(0)), 1), (Guard(buffer, 3, random.Random(0)), 0)):
        conductor.begin(0.0, range(3))
        if isinstance(conductor, Guard):
            assert conductor.begun(Begun(0, 0, 0, 1))
        said = [conductor.arrived(1.0, Arrived(0, 0, 0, 1)) for _ in range(2)]
        assert sum(isinstance(command, Commit) for commands in said for command in commands) == commits


def test_an_update_that_nobody_asked_for() -> None:
    guard = Guard(Sampled(size=1, steps=1), 3, random.Random(0))
    asked = next(command.client for command in guard.begin(0.0, range(3)) if isinstance(command, Fetch))
    for client in range(3):
        assert guard.begun(Begun(client, 0, 0, 1))
    for client in {0, 1, 2} - {asked}:
        assert guard.arrived(1.0, Arrived(client, 0, 0, 1)) == []
    assert guard.refused == {"late": 0, "repeated": 0, "unknown": 2}
    assert guard.arrived(1.0, Arrived(asked, 0, 0, 1))[0] == Commit(((asked, 0),))


def test_a_run_says_how_many_it_refused() -> None:
    made = {"method": {"name": "fedbuff", "buffer_size": 2}, "task": quadratic_world(4), "fleet": build("uniform", 4)}
    assert run(Experiment(**made, until={"commits": 2}, device="cpu")).result["refused"] == nothing_refused()
