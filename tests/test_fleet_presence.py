"""When clients are there: records that repeat, clients that come and go, and the clock that heeds both."""

import itertools
import math
import random

import numpy as np
import pytest

from offbeat.fleets.fleet import Fleet
from offbeat.fleets.make import build
from offbeat.fleets.presence import OnOff, Presence, Recorded
from offbeat.records import Arrived, Begun, Commit, Left
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled

SMALL = np.ones(3)


def test_recorded_presence_repeats_with_its_period():
    changes = [[(0.0, True), (4.0, False)], [(2.0, True)], [(0.0, False)], [(1.0, True), (3.0, False)]]
    presence = Recorded(changes, [10.0, None, 5.0, 4.0], users=np.array([0, 1, 2, 3, 0]))
    fleet = Fleet("days", 5, *[np.ones(5)] * 5, presence=presence)
    assert fleet.problems() == []
    asked = fleet.durations(0, 1.0, 1.0)
    assert list(itertools.islice(asked.presence(4), 4)) == [(0.0, True), (4.0, False), (10.0, True), (14.0, False)]
    assert list(asked.presence(1)) == [(0.0, False), (2.0, True)]
    assert list(asked.presence(2)) == [(0.0, False)]
    assert list(itertools.islice(asked.presence(3), 4)) == [(0.0, False), (1.0, True), (3.0, False), (5.0, True)]


@pytest.mark.parametrize(
    ("presence", "sentence"),
    [
        (Recorded([[]] * 3, [None] * 3), "presence of user 0: no changes; give at least"),
        (Recorded([[(0.0, True)]] * 2, [None] * 2), "presence: given for 2 clients of 3"),
        (Recorded([[(0.0, True)]] * 3, [None] * 2), "presence: 3 users but 2 periods"),
        (
            Recorded([[(0.0, True)]], [None], np.array([0, 1, 0])),
            "presence: a client is assigned to a user outside 0 to 0",
        ),
        (OnOff(0.0, 1.0, 0), "mean_on = 0.0; it must be a finite number > 0"),
    ],
)
def test_bad_presence_is_named(presence, sentence):
    problems = Fleet("bad", 3, SMALL, SMALL, SMALL, SMALL, SMALL, presence=presence).problems()
    assert problems[0].startswith(sentence)


def test_on_and_off_times_have_their_means_from_the_start():
    presence = OnOff(30.0, 10.0, seed=1)
    assert np.mean([next(presence(client))[1] for client in range(4000)]) == pytest.approx(0.75, abs=0.02)
    changes = list(itertools.islice(presence(3), 8001))
    assert changes == list(itertools.islice(presence(3), 8001))
    lasted = {True: [], False: []}
    for (begin, there), (end, other) in itertools.pairwise(changes):
        assert there is not other
        lasted[there].append(end - begin)
    assert np.mean(lasted[True]) == pytest.approx(30.0, rel=0.05)
    assert np.mean(lasted[False]) == pytest.approx(10.0, rel=0.05)


def spells(fleet, client, until):
    """The intervals in which a client is there."""
    changes = list(itertools.takewhile(lambda change: change[0] <= until, fleet.presence(client)))
    ends = [time for time, _ in changes[1:]] + [math.inf]
    return [(begin, end) for (begin, there), end in zip(changes, ends, strict=True) if there]


@pytest.mark.parametrize(
    "policy", [Buffer(size=3, steps=5), Rounds(steps=5, size=6, deadline=3.0), Sampled(size=2, steps=5)]
)
def test_nothing_is_consumed_from_a_client_that_is_away(policy):
    jitter = {"law": "uniform", "low": 0.5, "high": 1.5}
    links = {"latency": 0.05, "down_mbit": 8.0, "up_mbit": 4.0}
    fleet = build("custom", 12, 3, step_seconds=0.1, jitter=jitter, drop_out=0.1, mean_on=5.0, mean_off=3.0, **links)
    clock = VirtualClock(policy, fleet.durations(3, 1e5, 1e5), random.Random(0))
    rows = list(itertools.islice(clock, 800))
    there = {client: spells(fleet, client, rows[-1][0]) for client in range(12)}
    begun, arrived, consumed, losses = {}, {}, 0, 0
    for now, record in rows:
        if isinstance(record, Begun):
            begun[record.client, record.job] = now
        elif isinstance(record, Arrived):
            arrived[record.client, record.job] = now
        elif isinstance(record, Left):
            losses += all(abs(now - end) > 1e-9 for _, end in there[record.client])
        elif isinstance(record, Commit):
            for job in record.jobs:
                consumed += 1
                assert any(begin <= begun[job] <= arrived[job] <= end for begin, end in there[job[0]])
    assert consumed > 20
    assert losses > 5  # drop-outs happened as well


class Mornings(Presence):
    """Odd clients come after a second; it does not say how everyone begins."""

    def problems(self, clients):
        return []

    def __call__(self, client):
        return iter([(0.0, False), (1.0, True)] if client % 2 else [(0.0, True)])


class Bare:
    """It lacks what Presence answers for those who derive from it."""

    problems, __call__ = Mornings.problems, Mornings.__call__


def test_a_presence_of_ones_own_need_not_say_how_everyone_begins():
    fleet = Fleet("mornings", 3, *[np.ones(3)] * 5, presence=Mornings())
    assert fleet.problems() == []
    opening = [(0, True, math.inf), (1, False, 1.0), (2, True, math.inf)]
    assert list(fleet.durations(0, 1.0, 1.0).opening()) == opening
    assert list(VirtualClock(Rounds(2), fleet.durations(0, 1.0, 1.0), random.Random(0)).durations.opening()) == opening
    (sentence,) = Fleet("bare", 3, *[np.ones(3)] * 5, presence=Bare()).problems()
    assert sentence.endswith("it must be a Presence or None, which has opening")
