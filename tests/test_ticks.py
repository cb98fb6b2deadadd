"""Ticks: sums of durations are exact, so multiplying all of them changes no schedule, and what ties, ties."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.fleets.distributions import law
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.make import build
from offbeat.fleets.presence import OnOff, Recorded
from offbeat.fleets.timing import BlockDurations
from offbeat.keys import generator
from offbeat.records import Arrived, Begun, Commit, Row, WakeAt, Woke
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.device import Durations
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from offbeat.schedule.ticks import END, PER_SECOND, after, ticks
from worlds import Times

STEPS = 3
CLIENTS = 8
POLICIES = [
    Rounds(steps=STEPS, size=4),
    Rounds(steps=STEPS, deadline=1.3),
    Rounds(steps=STEPS, size=3, over_selection=2.0, deadline=0.7),
    Buffer(size=3, steps=STEPS),
    Buffer(size=2, steps=STEPS, concurrency=5),
    Buffer(size=3, steps=STEPS, restart="fresh"),
    Buffer(size=3, steps=STEPS, restart="fresh", overlap=True),
    Sampled(size=3, steps=STEPS),
    Sampled(size=3, steps=STEPS, overlap=False),
]


@dataclass(frozen=True)
class Multiplied(Durations):
    """A fleet's durations, their ticks multiplied by a whole number."""

    inner: Any
    times: int

    @property
    def clients(self) -> int:
        return self.inner.clients

    @property
    def download_bound(self) -> float:
        return self.more(self.inner.download_bound)

    def more(self, seconds: float) -> float:
        return self.times * ticks(seconds) / PER_SECOND

    def download(self, client: int, job: int) -> float:
        return self.more(self.inner.download(client, job))

    def compute(self, client: int, job: int, steps: int) -> float:
        return self.more(self.inner.compute(client, job, steps))

    def upload(self, client: int, job: int) -> float:
        return self.more(self.inner.upload(client, job))

    def fails(self, client: int, job: int) -> float | None:
        """A share that leads to the same tick, before it is multiplied."""
        share, seconds = self.inner.fails(client, job), self.inner.compute(client, job, STEPS)
        return share and ticks(share * seconds) / ticks(seconds)

    def presence(self, client: int) -> Iterator[tuple[float, bool]] | None:
        changes = self.inner.presence(client)
        return changes and ((self.more(time), there) for time, there in changes)


AWAY = Recorded([[(0.0, True), (2.1, False)], [(0.7, True)], [(0.3, True), (1.4, False)]], [2.8, None, 2.1],
                np.arange(CLIENTS) % 3)  # fmt: skip


@st.composite
def fleets(draw: Any) -> Any:
    """Times of few values that tie all the time, or any; steady, jittered, losing jobs, or coming and going."""
    rng = random.Random(draw(st.integers(0, 2**31)))
    values = draw(st.sampled_from([[0.1, 0.2, 0.3], [0.0, 0.07, 0.14], [1 / 3, 2 / 3, 1.0], None]))
    down, step, up = (np.array([rng.choice(values) if values else rng.random() for _ in range(CLIENTS)]) for _ in "dsu")
    jitter = draw(st.sampled_from([None, None, {"law": "trace", "values": [1, 2]}]))
    return Fleet(
        "ties", CLIENTS, step + 0.1, down, up, np.full(CLIENTS, np.inf), np.full(CLIENTS, np.inf),
        jitter=None if jitter is None else law(jitter), drop_out=draw(st.sampled_from([0.0, 0.0, 0.2])),
        presence=draw(st.sampled_from([None, None, AWAY, OnOff(5.0, 1.0, 3)])),
    ).durations(7, 0, 0)  # fmt: skip


def rows_of(policy: Any, durations: Any, times: int, seed: int, many: int = 500) -> list[Row]:
    if getattr(policy, "deadline", None):
        policy = replace(policy, deadline=times * ticks(policy.deadline) / PER_SECOND)
    clock = VirtualClock(policy, Multiplied(durations, times), generator(seed, "policy"))
    return list(itertools.islice(clock, many))


def in_ticks(rows: list[Row], times: int = 1) -> list[tuple[float, Any]]:
    """Rows whose times, and alarms, are whole numbers, multiplied."""
    woken = [(t, WakeAt(times * ticks(r.time), r.tag) if isinstance(r, WakeAt) else r) for t, r in rows]
    return [(times * ticks(time), record) for time, record in woken]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(deadline=None, max_examples=12)
@given(durations=fleets(), seed=st.integers(0, 99))
def test_multiplying_all_ticks_changes_no_schedule(policy: Any, durations: Any, seed: int) -> None:
    rows = rows_of(policy, durations, 1, seed)
    assert len(rows) == 500
    for times in (2, 7, 1000):
        assert in_ticks(rows_of(policy, durations, times, seed)) == in_ticks(rows, times)


@pytest.mark.parametrize("between", [Rounds(steps=STEPS), Buffer(size=2, steps=STEPS)], ids=str)
@pytest.mark.parametrize("link", [0.1, 1 / 7])
def test_the_same_for_clusters(between: Any, link: float) -> None:
    fleet = build("straggling", 9, 1, step_seconds=0.1, sigma=0.0, factor=2.0, mbit=None, latency=0.1,
                  clusters={"count": 3, "latency": link})  # fmt: skip
    policy = Hybrid(between)
    durations = BlockDurations(fleet.durations(0, 0, 0), fleet, policy, 0, 0.0)
    rows = rows_of(policy, durations, 1, 0)
    for times in (2, 7, 1000):
        assert in_ticks(rows_of(policy, durations, times, 0)) == in_ticks(rows, times)


@pytest.mark.parametrize("policy", POLICIES[3:], ids=str)
@pytest.mark.parametrize("times", [2, 7, 1000])
def test_the_unit_of_seconds_changes_no_schedule(policy: Any, times: int) -> None:
    """Decimal seconds are whole ticks, so these may be multiplied before they are rounded, too."""
    for seed in range(20):
        rng = random.Random(seed)
        columns = [[rng.randrange(1, 40) / 1000 for _ in range(CLIENTS)] for _ in "dsu"]
        one, other = (
            [record for _, record in itertools.islice(VirtualClock(policy, made, generator(seed, "policy")), 800)]
            for made in (Times(*columns), Times(*([times * x for x in column] for column in columns)))
        )
        assert one == other


def test_what_people_write_ties() -> None:
    """0.1 + 0.2 + 0.3 s, the same in another order, and a deadline of 0.6 s; three steps of 0.1 s and one of 0.3 s."""
    times = Times([0.1, 0.2, 0.3], [0.2, 0.3, 0.1], [0.3, 0.1, 0.2])
    rows = rows_of(Buffer(size=3, steps=1), times, 1, 0, 14)
    assert [time for time, record in rows if isinstance(record, Arrived)] == [0.6] * 3
    rows = rows_of(Rounds(steps=1, deadline=0.6), times, 1, 0, 14)
    heard = [(time, type(record)) for time, record in rows if isinstance(record, Arrived | Woke)]
    assert heard[0] == (0.6, Woke)  # scheduled before the arrivals of this moment
    assert heard[1] == (0.6, Arrived)
    durations = build("equal", 2, step_seconds=0.1, local_steps=[3, 1]).durations(0, 0, 0)
    begun = [(time, r.client) for time, r in rows_of(Buffer(size=1), durations, 1, 0, 60) if isinstance(r, Begun)]
    assert {time for time, client in begun if client == 0} <= {time for time, client in begun if client == 1}


def test_what_takes_time_takes_a_tick() -> None:
    assert [ticks(seconds) for seconds in (0.0, 1e-12, 4e-9, 6e-9, 2.4e-8, 0.044)] == [0, 1, 1, 1, 2, 4_400_000]
    assert after(2.1, 0.3) == 2.4
    durations = build("equal", 3, step_seconds=1e-12).durations(0, 0, 0)
    times = [time for time, record in rows_of(Buffer(size=1), durations, 1, 0, 100) if isinstance(record, Commit)]
    assert times[0] > 0
    assert times[-1] > times[0]


def test_every_tick_has_seconds_of_its_own_up_to_the_end() -> None:
    """So seconds lead back to the right tick, and `after` to the right sum."""
    rng = random.Random(0)
    for top in (1.0, 1e4, 1e9, END):
        for _ in range(2000):
            tick = rng.randrange(int(top) + 1)
            seconds = tick / PER_SECOND
            assert ticks(seconds) == tick
            assert (tick + 1) / PER_SECOND > seconds
            part = rng.randrange(tick + 1)
            assert after(part / PER_SECOND, (tick - part) / PER_SECOND) == seconds


@pytest.mark.parametrize("policy", [Rounds(steps=1), Sampled(size=1, steps=1)], ids=str)
def test_beyond_the_end_of_the_clock_is_a_sentence(policy: Any) -> None:
    days = Times([0.0] * 2, [86400.0 * 50] * 2, [0.0] * 2)
    rows: list[Row] = []
    with pytest.raises(OffbeatError, match=r"the next event is 3.456e\+07 s after the start, .* 33554432 s"):
        rows.extend(VirtualClock(policy, days, generator(0, "policy")))
    assert max(time for time, _ in rows) == 86400.0 * 350


def test_an_alarm_beyond_the_end_is_no_matter_until_then() -> None:
    rows = rows_of(Rounds(steps=1, deadline=1e12), Times([0.1], [0.1], [0.1]), 1, 0, 200)
    assert not any(isinstance(record, Woke) for _, record in rows)
