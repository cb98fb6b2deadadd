"""Policies as data in, data out; hand-computed traces of five clients; properties of the clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.records import (
    Arrived,
    Begun,
    Commit,
    Drop,
    Fetch,
    Finished,
    Joined,
    Left,
    Offer,
    Overwritten,
    Row,
    Start,
    WakeAt,
    Woke,
)
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.device import OWN_STEPS
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from offbeat.schedule.trace import Replay, difference, flat, unflat
from worlds import Times, times

# Five clients; one local step takes 1, 2, 3, 4, 5 seconds; a download 0.25 s, an upload 0.5 s.
FIVE = Times([0.25] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], [0.5] * 5)


def rows_of(policy: Any, durations: Any, until: float, seed: int = 0) -> list[Any]:
    clock = VirtualClock(policy, durations, generator(seed, "policy"))
    return list(itertools.takewhile(lambda row: row[0] <= until, clock))


def test_fedbuff_on_five_clients_event_by_event() -> None:
    """K = 2, Q = 1. A client's round trip is 0.75 s + its step: arrivals at 1.75, 2.75, 3.5, 3.75, 4.75, ..."""
    start = [(0.0, Start(c, 0, 1)) for c in range(5)]
    begun = [(0.25, Begun(c, 0, 0, 1)) for c in range(5)]
    assert rows_of(Buffer(size=2, steps=1), FIVE, 4.0) == [
        *start,
        *begun,
        (1.25, Finished(0, 0)),
        (1.75, Arrived(0, 0, 0, 1)),
        (1.75, Start(0, 0, 1)),  # the buffer holds one: client 0 pulls version 0 again
        (2.0, Begun(0, 1, 0, 1, 1)),
        (2.25, Finished(1, 0)),
        (2.75, Arrived(1, 0, 0, 1)),
        (2.75, Commit(((0, 0), (1, 0)))),  # version 1
        (2.75, Start(1, 1, 1)),
        (3.0, Finished(0, 1)),
        (3.0, Begun(1, 1, 1, 1, 1)),
        (3.25, Finished(2, 0)),
        (3.5, Arrived(0, 1, 0, 1)),
        (3.5, Start(0, 1, 1)),
        (3.75, Arrived(2, 0, 0, 1)),
        (3.75, Commit(((0, 1), (2, 0)))),  # version 2: client 0 came twice
        (3.75, Start(2, 2, 1)),
        (3.75, Begun(0, 2, 1, 1, 2)),
        (4.0, Begun(2, 1, 2, 1, 1)),
    ]


def test_dlsgd_homo_on_five_clients_event_by_event() -> None:
    """n = 2, K = 1. Uploads run beside computing; nobody trains twice from a version: client 0 waits for version 1."""
    assert rows_of(Buffer(size=2, steps=1, restart="fresh", overlap=True), FIVE, 5.3) == [
        (0.0, Offer(0, 1)),
        *[(0.25, Begun(c, 0, 0, 1)) for c in range(5)],
        (1.25, Finished(0, 0)),  # nothing new in its receive buffer: it waits
        (1.75, Arrived(0, 0, 0, 1)),
        (2.25, Finished(1, 0)),
        (2.75, Arrived(1, 0, 0, 1)),
        (2.75, Commit(((0, 0), (1, 0)))),
        (2.75, Offer(1, 1)),
        (3.0, Begun(0, 1, 1, 1, 1)),
        (3.0, Begun(1, 1, 1, 1, 1)),
        (3.25, Finished(2, 0)),  # version 1 came in at 3.0 while it computed
        (3.25, Begun(2, 1, 1, 1, 1)),
        (3.75, Arrived(2, 0, 0, 1)),
        (4.0, Finished(0, 1)),
        (4.25, Finished(3, 0)),
        (4.25, Begun(3, 1, 1, 1, 1)),
        (4.5, Arrived(0, 1, 1, 1)),
        (4.5, Commit(((2, 0), (0, 1)))),
        (4.5, Offer(2, 1)),
        (4.75, Arrived(3, 0, 0, 1)),
        (4.75, Begun(0, 2, 2, 1, 2)),
        (5.0, Finished(1, 1)),
        (5.0, Begun(1, 2, 2, 1, 2)),
        (5.25, Finished(4, 0)),
        (5.25, Begun(4, 1, 2, 1, 1)),  # the receive buffer was overwritten: version 2, not 1
    ]


class Dealt(random.Random):
    """A generator that draws the clients it is told to."""

    def __init__(self, *draws: list[int]) -> None:
        super().__init__(0)
        self.draws = list(draws)

    def choices(self, population: Any, *_: Any, k: int, **__: Any) -> list[int]:
        draw = self.draws.pop(0)
        assert len(draw) == k
        assert set(draw) <= set(population)
        return draw


def test_dlsgd_hetero_on_five_clients_event_by_event() -> None:
    """n = 2, K = 1. Drawn: {1, 1}, then {0, 2}, then {4, 0}. Client 1 is drawn twice and counts twice."""
    clock = VirtualClock(Sampled(size=2, steps=1), FIVE, Dealt([1, 1], [0, 2], [4, 0], [0, 0]))
    rows = list(itertools.takewhile(lambda row: row[0] <= 6.0, clock))
    assert rows == [
        (0.0, Offer(0, 1)),
        (0.0, Fetch(1)),
        *[(0.25, Begun(c, 0, 0, 1)) for c in range(5)],
        (1.25, Finished(0, 0)),  # into the send buffer: nobody asked
        (2.25, Finished(1, 0)),  # asked for: sent at once
        (2.75, Arrived(1, 0, 0, 1)),
        (2.75, Commit(((1, 0), (1, 0)))),
        (2.75, Offer(1, 1)),
        (2.75, Fetch(0)),  # its send buffer is full: sent at once, and empty then
        (2.75, Fetch(2)),  # its send buffer is empty: it answers when it has finished
        (3.0, Begun(0, 1, 1, 1, 1)),
        (3.0, Begun(1, 1, 1, 1, 1)),
        (3.25, Finished(2, 0)),
        (3.25, Begun(2, 1, 1, 1, 1)),
        (3.25, Arrived(0, 0, 0, 1)),
        (3.75, Arrived(2, 0, 0, 1)),
        (3.75, Commit(((0, 0), (2, 0)))),
        (3.75, Offer(2, 1)),
        (3.75, Fetch(4)),
        (3.75, Fetch(0)),
        (4.0, Finished(0, 1)),
        (4.0, Begun(0, 2, 2, 1, 2)),  # version 2 came in at this very moment
        (4.25, Finished(3, 0)),
        (4.25, Begun(3, 1, 2, 1, 1)),
        (4.5, Arrived(0, 1, 1, 1)),
        (5.0, Finished(1, 1)),
        (5.0, Begun(1, 2, 2, 1, 2)),
        (5.0, Finished(0, 2)),  # waits in the send buffer; nothing new to train from
        (5.25, Finished(4, 0)),
        (5.25, Begun(4, 1, 2, 1, 1)),
        (5.75, Arrived(4, 0, 0, 1)),
        (5.75, Commit(((4, 0), (0, 1)))),
        (5.75, Offer(3, 1)),
        (5.75, Fetch(0)),
        (6.0, Begun(0, 3, 3, 1, 3)),
    ]


def test_send_buffers_are_overwritten() -> None:
    """Client 0 is never drawn: each of its updates pushes out the one before."""
    clock = VirtualClock(Sampled(size=1, steps=1), FIVE, Dealt([1], [1], [1], [1]))
    rows = list(itertools.takewhile(lambda row: row[0] <= 9.0, clock))
    gone = [record for _, record in rows if isinstance(record, Overwritten) and record.client == 0]
    assert gone[:2] == [Overwritten(0, 0), Overwritten(0, 1)]
    assert (0, 0) not in {job for _, record in rows if isinstance(record, Commit) for job in record.jobs}


def test_rounds_wait_for_the_slowest_and_drop_what_was_over_selected() -> None:
    rows = rows_of(Rounds(steps=1, size=2, over_selection=2.0), FIVE, 20.0)
    commits = [(now, record) for now, record in rows if isinstance(record, Commit)]
    drops = [record for _, record in rows if isinstance(record, Drop)]
    assert all(len(record.jobs) == 2 for _, record in commits)
    assert len(drops) == 2 * len(commits)
    first = {record.client for now, record in rows if isinstance(record, Start) and now == 0.0}
    fastest = sorted(first)[:2]
    assert commits[0] == (0.25 + (fastest[1] + 1) + 0.5, Commit(((fastest[0], 0), (fastest[1], 0))))


def test_a_deadline_closes_a_round_with_what_is_there() -> None:
    rows = rows_of(Rounds(steps=1, deadline=3.0), FIVE, 3.0)
    assert (0.0, WakeAt(3.0, 1)) in rows
    at = rows.index((3.0, Woke(1)))
    late = [record for c in (2, 3, 4) for record in (Drop(c), Overwritten(c, 0))]
    again = [*(Start(c, 1, 1) for c in range(5)), WakeAt(6.0, 2)]
    assert [record for _, record in rows[at + 1 :]] == [*late, Commit(((0, 0), (1, 0))), *again]
    early = rows_of(Rounds(steps=1, deadline=1.0), FIVE, 1.8)
    assert (1.75, Commit(((0, 0),))) in early  # nothing at the deadline: the first arrival closes the round


def test_a_concurrency_limit_is_never_exceeded_and_gives_everyone_a_turn() -> None:
    policy = Buffer(size=3, steps=1, concurrency=4)
    rows = rows_of(policy, times(12), 100.0)
    working, most, seen = 0, 0, set()
    for _, record in rows:
        working += isinstance(record, Start) - isinstance(record, Arrived)
        most = max(most, working)
        if isinstance(record, Arrived):
            seen.add(record.client)
    assert most == 4
    assert seen == set(range(12))


def test_fresh_restart_never_trains_twice_from_a_version() -> None:
    rows = rows_of(Buffer(size=3, steps=1, restart="fresh"), times(8, 20), 60.0)
    pairs = Counter((r.client, r.version) for _, r in rows if isinstance(r, Begun))
    assert max(pairs.values()) == 1
    newest = rows_of(Buffer(size=3, steps=1), times(8, 20), 60.0)
    assert max(Counter((r.client, r.version) for _, r in newest if isinstance(r, Begun)).values()) > 1


def test_without_overlap_a_client_does_one_thing_at_a_time() -> None:
    rows = rows_of(Sampled(size=2, steps=1, overlap=False), FIVE, 40.0)
    free = dict.fromkeys(range(5), 0.0)
    for now, record in rows:
        if isinstance(record, Begun):
            assert now >= free[record.client] + 0.25 - 1e-9  # a download after the last upload or computing
        elif isinstance(record, Finished | Arrived):
            free[record.client] = now
    assert sum(isinstance(record, Commit) for _, record in rows) > 5


POLICIES = [
    Rounds(steps=2, size=4),
    Rounds(steps=2, size=3, replacement=True),
    Rounds(steps=2, size=3, over_selection=1.5, deadline=2.0),
    Buffer(size=3, steps=2),
    Buffer(size=3, steps=2, concurrency=5),
    Buffer(size=3, steps=2, restart="fresh"),
    Buffer(size=3, steps=2, restart="fresh", overlap=True),
    Sampled(size=3, steps=2),
    Sampled(size=3, steps=2, overlap=False),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_any_schedule_keeps_its_promises(policy: Any, seed: int) -> None:
    """Under jitter, drop-out and comings and goings: it goes on, replays, and commits only what arrived, once."""
    fleet = build(
        "custom", 10, seed, step_seconds={"law": "lognormal", "median": 0.1, "sigma": 0.7}, latency=0.05,
        jitter={"law": "lognormal", "median": 1.0, "sigma": 0.3}, drop_out=0.1, mean_on=5.0, mean_off=1.0,
    )  # fmt: skip
    clock = VirtualClock(policy, fleet.durations(seed, 0, 0), generator(seed, "policy"))
    rows, arrived, used, begun, version = [], set(), set(), {}, 0
    for now, record in clock:
        rows.append((now, record))
        if isinstance(record, Begun):
            assert clock.floor <= record.version <= version or not clock.offers
            begun[record[:2]] = record
        elif isinstance(record, Arrived):
            arrived.add(record[:2])
        elif isinstance(record, Commit):
            assert set(record.jobs) <= arrived - used
            assert record.jobs
            used |= set(record.jobs)
            version += 1
            if version == 40:
                break
    assert version == 40
    assert [now for now, _ in rows] == sorted(now for now, _ in rows)
    assert [unflat(flat(row)) for row in rows] == rows
    assert list(Replay(rows, policy, 10, generator(seed, "policy"))) == rows
    if policy.kind in ("buffer-broadcast", "sampled", "buffer-fresh"):
        pairs = Counter((begun[job].client, begun[job].version) for job in used)
        assert max(pairs.values()) == 1


@pytest.mark.parametrize("policy", [Buffer(size=10, restart="fresh", overlap=True), Sampled(size=3)], ids=str)
def test_lost_jobs_do_not_stall_a_broadcast_schedule(policy: Any) -> None:
    fleet = build("equal", 10, drop_out=0.3, latency=0.01)
    clock = VirtualClock(policy, fleet.durations(1, 0, 0), generator(1, "policy"))
    commits = (record for _, record in itertools.islice(clock, 200_000) if isinstance(record, Commit))
    assert len(list(itertools.islice(commits, 300))) == 300


@pytest.mark.parametrize("unit", [0.1, 1.0, 2.0, 3.0, 7.0, 10.0])
def test_the_unit_of_time_does_not_decide_a_tie(unit: float) -> None:
    """Version 6 comes in at the moment client 1 is free; it is taken, whichever way the sums are rounded."""
    fleet = Times([5.521 * unit, 11.34 * unit], [8.029 * unit, 12.474 * unit], [12.889 * unit, 2.245 * unit])
    rows = rows_of(Buffer(size=1, steps=1, restart="fresh", overlap=True), fleet, 80 * unit)
    assert [record.version for _, record in rows if isinstance(record, Begun) and record[:2] == (1, 4)] == [6]


def test_replay_says_where_a_policy_differs() -> None:
    rows = rows_of(Buffer(size=2, steps=1), FIVE, 10.0)
    with pytest.raises(OffbeatError, match=r"replay: .* the policy"):
        list(Replay(rows, Buffer(size=3, steps=1), 5, generator(0, "policy")))
    changed = rows[:-1]
    assert difference(rows, rows) is None
    assert "rows" in str(difference(rows, changed))
    assert difference(rows, [*rows[:3], (9.0, Left(1)), *rows[4:]]).startswith("row 3")  # type: ignore[union-attr]


def test_a_horizon_knows_what_will_be_consumed_and_no_more() -> None:
    clock = VirtualClock(Sampled(size=3, steps=1), times(12), generator(0, "policy"))
    horizon = Horizon(clock, ahead=120, last=50)
    first = next(iter(horizon))
    used = {job for step in [first, *horizon.steps] for job in step.commit.jobs}
    ready = horizon.ready(0)
    assert ready
    assert {job[:2] for job in ready} <= used
    assert all(job.version == 0 for job in ready)
    assert set(first.commit.jobs) <= {job[:2] for job in ready}
    assert sum(1 for _ in horizon) == 49


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (Buffer(size=11), "size = 11 is larger than the 10 clients"),
        (Buffer(size=5, concurrency=4), "size = 5 is larger than the 4 clients at work at once"),
        (Buffer(size=5, concurrency=11), "concurrency = 11; it must be between 1 and the 10 clients"),
        (Buffer(size=0), "size = 0"),
        (Buffer(size=2, steps=0), "local steps = 0"),
        (Buffer(size=2, concurrency=5, restart="fresh", overlap=True), "takes no concurrency limit"),
        (Buffer(size=2, restart="later"), "restart = 'later'"),  # type: ignore[arg-type]
        (Rounds(size=11), "11 distinct clients asked for"),
        (Rounds(size=8, over_selection=1.5), "12 distinct clients asked for"),
        (Rounds(size=0), "size = 0"),
        (Rounds(over_selection=0.5), "over_selection = 0.5"),
        (Rounds(deadline=-1.0), "deadline = -1.0"),
        (Rounds(replacement=True), "replacement needs a size"),
        (Sampled(size=0), "size = 0"),
        (Sampled(steps=0), "local steps = 0"),
    ],
)
def test_impossible_policies_are_said_so(policy: Any, sentence: str) -> None:
    assert any(sentence in problem for problem in policy.problems(10)), policy.problems(10)


def test_possible_policies_have_no_problems() -> None:
    assert [p for policy in POLICIES for p in policy.problems(10)] == []


def test_everyone_gone_and_back() -> None:
    """A round that loses its whole cohort opens anew when somebody joins."""
    conductor = Rounds(steps=1).conductor(2, random.Random(0))
    assert conductor.begin(0.0, [0, 1]) == [Start(0, 0, 1), Start(1, 0, 1)]
    assert conductor.left(1.0, Left(0)) == []
    assert conductor.left(2.0, Left(1)) == []
    assert conductor.joined(3.0, Joined(1)) == [Start(1, 0, 1)]
    assert conductor.arrived(4.0, Arrived(1, 0, 0, 1)) == [Commit(((1, 0),)), Start(1, 1, 1)]


def test_clients_that_may_choose_take_their_own_number_of_steps() -> None:
    """Steps of 1, 2 and 3 seconds, 3, 1 and 2 of them; the round ends with client 2, which takes 0.25 + 6 + 0.5 s."""
    durations = Times([0.25] * 3, [1.0, 2.0, 3.0], [0.5] * 3, [3, 1, 2])
    rows = rows_of(Rounds(), durations, 7.0)
    own = [(0, 3), (1, 1), (2, 2)]
    assert [row for row in rows if isinstance(row[1], Start | Begun | Finished | Commit)] == [
        *[(0.0, Start(client, 0, 0)) for client, _ in own],
        *[(0.25, Begun(client, 0, 0, steps)) for client, steps in own],
        (2.25, Finished(1, 0)),
        (3.25, Finished(0, 0)),
        (6.25, Finished(2, 0)),
        (6.75, Commit(((1, 0), (0, 0), (2, 0)))),
        *[(6.75, Start(client, 1, 0)) for client, _ in own],
        *[(7.0, Begun(client, 1, 1, steps, steps)) for client, steps in own],
    ]
    ordered = rows_of(Rounds(steps=4), durations, 7.0)
    assert {record.steps for _, record in ordered if isinstance(record, Begun)} == {4}


@pytest.mark.parametrize(
    "policy", [Buffer(2), Buffer(2, restart="fresh", overlap=True), Buffer(2, restart="fresh"), Sampled(2)]
)
def test_every_policy_leaves_steps_to_the_clients(policy: Any) -> None:
    durations = Times([0.25] * 3, [0.1, 0.2, 0.3], [0.5] * 3, [3, 1, 2])
    found = {
        (record.client, record.steps) for _, record in rows_of(policy, durations, 9.0) if isinstance(record, Begun)
    }
    assert found == {(0, 3), (1, 1), (2, 2)}
    usual = rows_of(policy, Times([0.25] * 3, [0.1, 0.2, 0.3], [0.5] * 3), 9.0)
    assert {record.steps for _, record in usual if isinstance(record, Begun)} == {OWN_STEPS}


def test_probes_come_before_the_steps_of_the_same_clients() -> None:
    durations = Times([0.1] * 6, [0.1] * 6, [0.1] * 6, [3, 1, 2, 5, 4, 6])
    rows = rows_of(Rounds(size=3, probes=2), durations, 9.0)
    halves = [record.jobs for _, record in rows if isinstance(record, Commit)]
    steps = {(record.client, record.job): record.steps for _, record in rows if isinstance(record, Begun)}
    assert len(halves) > 6
    for first, second in zip(halves[::2], halves[1::2], strict=False):
        assert {client for client, _ in first} == {client for client, _ in second}
        assert {steps[job] for job in first} == {2}
        assert all(steps[job] == durations.steps[job[0]] for job in second)


def test_the_second_half_goes_to_those_that_are_left() -> None:
    conductor = Rounds(probes=1).conductor(3, random.Random(0))
    assert conductor.begin(0.0, [0, 1, 2]) == [Start(client, 0, 1) for client in range(3)]
    assert conductor.left(0.5, Left(2)) == []
    assert conductor.joined(0.6, Joined(2)) == []
    assert conductor.arrived(1.0, Arrived(0, 0, 0, 1)) == []
    assert conductor.arrived(1.0, Arrived(1, 0, 0, 1)) == [Commit(((0, 0), (1, 0))), Start(0, 1, 0), Start(1, 1, 0)]
    assert conductor.left(2.0, Left(0)) == []
    assert conductor.left(2.0, Left(1)) == []  # nobody of them is: it waits, as client 2 gave no gradient
    assert conductor.left(2.1, Left(2)) == []
    assert conductor.joined(2.2, Joined(2)) == []
    assert conductor.joined(2.5, Joined(1)) == [Start(1, 1, 0)]
    assert conductor.arrived(3.0, Arrived(1, 1, 1, 5)) == [Commit(((1, 1),)), Start(1, 2, 1), Start(2, 2, 1)]


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (Rounds(steps=0), "rounds: local steps = 0; a job needs at least 1"),
        (Rounds(probes=0), "rounds: probes = 0; a job needs at least 1"),
        (Rounds(size=2, probes=1, replacement=True), "rounds: probes ask each client of a round once"),
    ],
)
def test_steps_that_make_no_job_are_refused(policy: Any, sentence: str) -> None:
    (found,) = policy.problems(3)
    assert found.startswith(sentence)


class Restless:
    """A driver under which a client comes and goes and nothing else ever happens."""

    floor = 0
    refused: dict[str, int] = {}

    def __iter__(self) -> Iterator[Row]:
        return ((float(second), Left(0) if second % 2 else Joined(0)) for second in itertools.count())


def test_a_schedule_that_never_commits_is_noticed_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.schedule.horizon.PATIENCE", (10_000, 10))
    with pytest.raises(OffbeatError, match=r"makes no commit after number 0: until .* virtual s"):
        next(Horizon(Restless()))
    late = Horizon(Restless(), until=50.0)
    assert next(late, None) is None
    assert late.late


def test_somebody_who_wants_an_end_need_not_wait_for_a_commit() -> None:
    horizon = Horizon(Restless())
    horizon.stop = True
    with pytest.raises(KeyboardInterrupt):
        next(horizon)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_sampled_rounds_go_on_when_everyone_was_gone(seed: int, overlap: bool) -> None:
    fleet = build("custom", 3, seed, step_seconds=0.05, drop_out=0.1, mean_on=1.0, mean_off=3.0)
    clock = VirtualClock(Sampled(3, 2, overlap), fleet.durations(seed, 0, 0), generator(seed, "policy"))
    commits = (record for _, record in itertools.islice(clock, 60_000) if isinstance(record, Commit))
    assert len(list(itertools.islice(commits, 100))) == 100


def test_fresh_clients_do_not_repeat_a_version_after_coming_back() -> None:
    conductor = Buffer(size=3, steps=1, restart="fresh").conductor(3, random.Random(0))
    conductor.begin(0.0, range(3))
    assert conductor.arrived(1.0, Arrived(0, 0, 0, 1)) == []
    assert conductor.left(2.0, Left(0)) == []
    assert conductor.joined(3.0, Joined(0)) == []  # it has version 0 behind it
    conductor.arrived(4.0, Arrived(1, 0, 0, 1))
    orders = conductor.arrived(5.0, Arrived(2, 0, 0, 1))
    assert orders[1:] == [Start(client, 1, 1) for client in (0, 1, 2)]


def test_the_horizon_counts_just_the_versions_that_known_jobs_need() -> None:
    for policy in (
        Buffer(3, 1),
        Buffer(3, 1, concurrency=4),
        Buffer(3, 1, restart="fresh", overlap=True),
        Sampled(3, 1),
    ):
        horizon = Horizon(VirtualClock(policy, times(9), generator(0, "policy")), 60, 200)
        for _ in horizon:
            jobs: list[Begun] = [*horizon.wanted.values(), *horizon.begun.values()]
            orders = [v for versions in horizon.ordered.values() for v in versions]
            assert set(horizon.held) == {job.version for job in jobs} | set(orders)
            assert all(horizon.ordered.values())
            for job in horizon.ready(horizon.given):
                horizon.computed(job[:2])
