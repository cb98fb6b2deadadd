"""The virtual clock against a second, naive implementation of the same schedules, and both against paper and pencil."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from offbeat.records import Arrived, Begun, Commit, Fetch, Finished, Overwritten
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.device import Durations
from offbeat.schedule.sampled import Sampled

COMMITS = 60
STEPS = 3


# ---- fleets -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table(Durations):
    """Seconds of each client; `jitter` > 0 stretches every job's parts by a factor in [1, 1 + jitter].

    They are rounded to the clock's tick, 10 ns, so that the oracle adds up the same numbers.
    """

    d: tuple[float, ...]
    step: tuple[float, ...]
    u: tuple[float, ...]
    jitter: float = 0.0
    downloads_jitter: bool = False

    @property
    def clients(self):
        return len(self.d)

    @property
    def download_bound(self):
        return max(self.d) * (1 + self.jitter)

    def stretch(self, part, client, job):
        return 1 + self.jitter * chance(part, client, job) if self.jitter else 1.0

    def download(self, client, job):
        return round(self.d[client] * (self.stretch("d", client, job) if self.downloads_jitter else 1.0), 8)

    def compute(self, client, job, steps):
        return round(steps * self.step[client] * self.stretch("c", client, job), 8)

    def upload(self, client, job):
        return round(self.u[client] * self.stretch("u", client, job), 8)

    def fails(self, client, job):
        return None

    def presence(self, client):
        return None

    def parts(self, steps):
        """The three tables as the oracle takes them."""
        d = self.download if self.downloads_jitter else self.d
        return d, lambda client, job: self.compute(client, job, steps), self.upload


@cache
def chance(*words):
    return random.Random(repr(words)).random()


@st.composite
def instances(draw, pulls=False):
    """A fleet with speeds up to 20x apart and transfers from 1/100 to 5 times the computing, and a size.

    Times must not tie. Where versions are broadcast, equal times for all jobs of a client make ties of themselves:
    two of its uploads, one job apart, that both commit bring the second version back at the very moment when the
    job begun on the first is done. So there every job differs a little.
    """
    clients = draw(st.integers(3, 12))
    size = draw(st.integers(1, clients))
    share = draw(st.sampled_from([0.01, 0.1, 0.5, 1.0, 5.0]))
    jitter = draw(st.sampled_from([0.0, 0.001, 2.0] if pulls else [0.001, 2.0]))
    rng = random.Random(draw(st.integers(0, 10**6)))
    step = tuple(rng.uniform(1, 20) / STEPS for _ in range(clients))
    d, u = (tuple(round(share * rng.uniform(1, 20), 8) for _ in range(clients)) for _ in "du")
    return Table(d, step, u, jitter, pulls and jitter > 0), size


# ---- what the package did -----------------------------------------------------------------------
class Seen:
    """The rows up to the given commit, in the oracle's words."""

    def __init__(self, policy, table, commits, rng=None):
        self.commits, self.begun, self.lost, self.fetched = [], [], [], [[]]
        version, finished = {}, set()
        for time, record in VirtualClock(policy, table, rng or random.Random(7)):
            match record:
                case Begun(client, job, start, steps):
                    assert steps == policy.steps
                    version[client, job] = start
                    self.begun.append((time, client, job, start))
                case Finished(client, job):
                    finished.add((client, job))
                case Arrived(client, job, start, _):
                    assert version[client, job] == start
                    assert (client, job) in finished
                case Overwritten(client, job):
                    self.lost.append((time, client, job))
                case Fetch(client):
                    self.fetched[-1].append(client)
                case Commit(jobs):
                    self.commits.append((time, [(*name, version[name]) for name in jobs]))
                    self.fetched.append([])
                    if len(self.commits) == commits:
                        break

    def draws(self):
        """Whom each round drew, as often as drawn; those it asked are the same clients."""
        drawn = [[client for client, _, _ in updates] for _, updates in self.commits]
        for round_, asked in zip(drawn, self.fetched, strict=False):
            assert sorted(set(round_)) == sorted(asked)
        return drawn


def assert_same(ours, theirs):
    """Equal rows `(time, ...)`, the times to 1e-9."""
    assert [row[1:] for row in ours] == [row[1:] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert math.isclose(mine[0], other[0], rel_tol=1e-9, abs_tol=1e-9)


def unordered(commits):
    return [(time, Counter(updates)) for time, updates in commits]


# ---- by chance ----------------------------------------------------------------------------------
by_chance = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@by_chance
@given(instances(pulls=True))
def test_fedbuff(instance):
    table, size = instance
    seen = Seen(Buffer(size=size, steps=STEPS), table, COMMITS)
    commits, begun = oracle.fedbuff(table.clients, *table.parts(STEPS), size, COMMITS)
    assert_same(seen.commits, commits)
    assert_same(seen.begun, begun)
    assert seen.lost == []


@by_chance
@given(instances())
def test_dlsgd_homo(instance):
    table, size = instance
    seen = Seen(Buffer(size=size, steps=STEPS, restart="fresh", overlap=True), table, COMMITS)
    commits, begun = oracle.dlsgd_homo(table.clients, *table.parts(STEPS), size, COMMITS)
    assert_same(seen.commits, commits)
    assert_same(seen.begun, begun)
    assert seen.lost == []


@by_chance
@given(instances(), st.integers(0, 10**6))
def test_dlsgd_hetero(instance, seed):
    table, size = instance
    seen = Seen(Sampled(size=size, steps=STEPS), table, COMMITS, random.Random(seed))
    draws = seen.draws()
    assert {len(drawn) for drawn in draws} == {size}
    commits, begun, lost = oracle.dlsgd_hetero(table.clients, *table.parts(STEPS), draws, COMMITS)
    assert_same(unordered(seen.commits), unordered(commits))
    assert_same(seen.begun, begun)
    assert_same(seen.lost, lost)


# ---- by hand ------------------------------------------------------------------------------------
# Five clients and two updates per commit, small enough for paper and pencil. A turn (download, compute, upload)
# takes 3, 5, 7, 11.25 and 13 seconds. Commits are (time, [(client, job, version), ...]); the jobs begun are, per
# client, (time, version).
FIVE = Table((1.0, 1.25, 2.0, 2.25, 3.0), (1.5, 3.25, 4.25, 8.25, 9.75), (0.5, 0.5, 0.75, 0.75, 0.25))
C_FIVE = FIVE.step  # one step per job

FEDBUFF = (
    [
        (5.0, [(0, 0, 0), (1, 0, 0)]),
        (7.0, [(0, 1, 0), (2, 0, 0)]),  # client 0 came back at 3, before the first commit
        (10.0, [(0, 2, 1), (1, 1, 1)]),
        (12.0, [(3, 0, 0), (0, 3, 2)]),
        (14.0, [(4, 0, 0), (2, 1, 2)]),
    ],
    {
        0: [(1.0, 0), (4.0, 0), (7.0, 1), (10.0, 2), (13.0, 4)],
        1: [(1.25, 0), (6.25, 1), (11.25, 3)],
        2: [(2.0, 0), (9.0, 2)],
        3: [(2.25, 0), (13.5, 3)],
        4: [(3.0, 0)],
    },
)
HOMO = (
    [
        (5.0, [(0, 0, 0), (1, 0, 0)]),
        (8.0, [(2, 0, 0), (0, 1, 1)]),  # client 0 was free at 2.5 and had to wait for version 1
        (11.0, [(1, 1, 1), (0, 2, 2)]),
        (12.0, [(3, 0, 0), (2, 1, 1)]),
        (13.25, [(4, 0, 0), (1, 2, 2)]),
    ],
    {
        0: [(1.0, 0), (6.0, 1), (9.0, 2), (12.0, 3)],
        1: [(1.25, 0), (6.25, 1), (9.5, 2), (12.75, 3)],
        2: [(2.0, 0), (7.0, 1), (11.25, 2)],
        3: [(2.25, 0), (10.5, 2)],  # version 2 came in at 10.25, over version 1
        4: [(3.0, 0), (12.75, 2)],
    },
)
DRAWS = [[0, 0], [2, 0], [2, 1], [0, 3], [1, 4]]
HETERO = (
    [
        (3.0, [(0, 0, 0), (0, 0, 0)]),
        (7.0, [(0, 1, 1), (2, 0, 0)]),
        (11.25, [(1, 0, 0), (2, 1, 1)]),  # client 1's buffer was full; client 2's job ran until 10.5
        (12.0, [(0, 2, 2), (3, 0, 0)]),
        (13.0, [(1, 2, 2), (4, 0, 0)]),
    ],
    {
        0: [(1.0, 0), (4.0, 1), (8.0, 2), (12.25, 3)],
        1: [(1.25, 0), (4.5, 1), (8.25, 2), (12.5, 3)],
        2: [(2.0, 0), (6.25, 1), (10.5, 2)],
        3: [(2.25, 0), (10.5, 2)],
        4: [(3.0, 0), (12.75, 2)],
    },
)
LOST = [(11.5, 1, 1)]


class Told(random.Random):
    """A generator whose choices were made beforehand."""

    def __init__(self, draws):
        super().__init__(0)
        self.draws = iter([*draws, draws[-1]])  # the last commit draws once more

    def choices(self, population, weights=None, *, cum_weights=None, k=1):
        drawn = next(self.draws)
        assert len(drawn) == k
        assert set(drawn) <= set(population)
        return drawn


def per_client(begun):
    found = {client: [] for client in range(5)}
    for time, client, job, version in begun:
        assert job == len(found[client])
        found[client].append((time, version))
    return found


@pytest.mark.parametrize(
    ("policy", "slow", "expected"),
    [
        (Buffer(size=2, steps=1), oracle.fedbuff, FEDBUFF),
        (Buffer(size=2, steps=1, restart="fresh", overlap=True), oracle.dlsgd_homo, HOMO),
    ],
    ids=["fedbuff", "dlsgd-homo"],
)
def test_five_clients_on_paper(policy, slow, expected):
    commits, begun = slow(5, FIVE.d, C_FIVE, FIVE.u, 2, 5)
    assert (commits, per_client(begun)) == expected
    seen = Seen(policy, FIVE, 5)
    assert (seen.commits, per_client(seen.begun)) == expected


def test_five_clients_drawn_on_paper():
    commits, begun, lost = oracle.dlsgd_hetero(5, FIVE.d, C_FIVE, FIVE.u, DRAWS, 5)
    assert (commits, per_client(begun), lost) == (*HETERO, LOST)
    seen = Seen(Sampled(size=2, steps=1), FIVE, 5, Told(DRAWS))
    assert (unordered(seen.commits), per_client(seen.begun), seen.lost) == (unordered(commits), HETERO[1], LOST)
