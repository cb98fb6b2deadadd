"""What makes a million clients possible, held against the plain way of doing it; and a million clients."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat
from offbeat import Experiment, run
from offbeat.fleets.distributions import law
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.presence import OnOff, Recorded
from offbeat.keys import generator
from offbeat.records import Begun, Commit
from offbeat.schedule.agenda import Agenda
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.pool import Pool
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from worlds import Times

few = settings(deadline=None, max_examples=60)
ticks = st.integers(0, 4).map(float)  # few distinct numbers, so that much happens at one moment


@few
@given(first=st.lists(ticks, min_size=1, max_size=30), after=st.lists(st.lists(ticks, max_size=3), max_size=80))
def test_the_agenda_gives_what_a_heap_gives(first: list[float], after: list[list[float]]) -> None:
    """Each entry that comes out puts further ones, some of them at its own time."""
    agenda, heap, count = Agenda(), [], itertools.count()

    def put(time: float) -> None:
        name = next(count)
        agenda.put((time, lambda *_: None, name, 0))
        heapq.heappush(heap, (time, name))

    for time in first:
        put(time)
    more = iter(after)
    for now, _, name, _ in agenda:
        assert (now, name) == heapq.heappop(heap)
        for delay in next(more, []):
            put(now + delay)
    assert not heap


@few
@given(seed=st.integers(0, 2**31), clients=st.integers(1, 60))
def test_a_pool_is_a_list(seed: int, clients: int) -> None:
    rng, one, two = random.Random(seed), random.Random(seed), random.Random(seed)
    plain = rng.sample(range(clients), rng.randint(0, clients))
    pool = Pool(clients, plain)

    def drawn() -> int:
        place = one.randrange(len(plain))
        plain[place], plain[-1] = plain[-1], plain[place]
        return plain.pop()

    for _ in range(200):
        outside = sorted(set(range(clients)) - set(plain))
        what = rng.choice(["append", "draw", "draw", "exchange", "remove", "remove", "empty"])
        if what == "append" and outside:
            plain.append(rng.choice(outside))
            pool.append(plain[-1])
        elif what == "draw" and plain:
            assert pool.draw(two.getrandbits) == (drawn() if len(plain) > 1 else plain.pop())
        elif what == "exchange" and outside:
            plain.append(rng.choice(outside))
            assert pool.exchange(plain[-1], two.getrandbits) == (drawn() if len(plain) > 1 else plain.pop())
        elif what == "remove":
            client = rng.randrange(clients)
            assert pool.remove(client) is (client in plain)
            plain = [other for other in plain if other != client]
        elif what == "empty" and rng.random() < 0.1:
            assert pool.empty() == plain
            plain = []
        assert list(pool) == plain
        assert [pool[place] for place in range(len(pool))] == plain
        assert one.getstate() == two.getstate()


IN_TURN = [
    Rounds(steps=2, size=4),
    Rounds(steps=1, size=3, replacement=True, deadline=2.0),
    Rounds(steps=2, size=3, over_selection=1.5, deadline=3.0),
    Buffer(size=3, steps=2),
    Buffer(size=2, steps=1, concurrency=5),
    Buffer(size=3, steps=2, restart="fresh"),
]
AWAY = Recorded([[(0.0, True), (6.0, False)], [(2.0, True)], [(1.0, True), (4.0, False)]], [10.0, None, 7.5],
                np.arange(10) % 3)  # fmt: skip


@st.composite
def fleets(draw: Any) -> Any:
    """Ten clients: steady with many ties, jittered, losing jobs, or coming and going."""
    rng = random.Random(draw(st.integers(0, 2**31)))
    few = draw(st.sampled_from([[0.0, 1.0], [0.5, 1.0, 2.0], None]))
    columns = [np.array([rng.choice(few) if few else rng.random() for _ in range(10)]) for _ in range(3)]
    if draw(st.booleans()):
        return Times(*(column.tolist() for column in columns))
    jitter = draw(
        st.sampled_from([None, {"law": "trace", "values": [1, 2]}, {"law": "uniform", "low": 0.5, "high": 2}])
    )
    return Fleet(
        "ten", 10, columns[0] + 0.25, columns[1], columns[2], np.full(10, math.inf), np.full(10, math.inf),
        jitter=None if jitter is None else law(jitter), drop_out=draw(st.sampled_from([0.0, 0.2])),
        presence=draw(st.sampled_from([None, AWAY, OnOff(5.0, 1.0, 3)])),
    ).durations(7, 0, 0)  # fmt: skip


@pytest.mark.parametrize("policy", IN_TURN, ids=str)
@few
@given(durations=fleets(), seed=st.integers(0, 99))
def test_the_loop_for_clients_in_turn_gives_what_the_general_one_gives(policy: Any, durations: Any, seed: int) -> None:
    fast, general = (VirtualClock(policy, durations, generator(seed, "policy")) for _ in range(2))
    assert fast.in_turn
    general.in_turn = False
    assert list(itertools.islice(fast, 600)) == list(itertools.islice(general, 600))


@few
@given(durations=fleets(), seed=st.integers(0, 99), overlap=st.booleans(), size=st.integers(1, 6))
def test_no_job_begins_below_the_floor(durations: Any, seed: int, overlap: bool, size: int) -> None:
    """Rows are handed out many at a time; the floor that a reader sees is that of the row in hand."""
    for policy in (Sampled(size, 1, overlap), Buffer(size, 1, restart="fresh", overlap=True)):
        clock = VirtualClock(policy, durations, generator(seed, "policy"))
        floor = 0
        for _, record in itertools.islice(clock, 600):
            assert clock.floor >= floor
            floor = clock.floor
            if isinstance(record, Begun):
                assert record.version >= floor


def test_rows_before_an_error_are_given() -> None:
    class Fails(random.Random):
        def choices(self, *args: Any, **options: Any) -> Any:
            self.left = getattr(self, "left", 3) - 1
            if self.left < 0:
                raise ZeroDivisionError
            return super().choices(*args, **options)

    rows: list[Any] = []
    clock = VirtualClock(Sampled(2, 1), Times([0.1] * 4, [1.0, 2.0, 3.0, 4.0], [0.1] * 4), Fails(0))
    with pytest.raises(ZeroDivisionError):
        rows.extend(clock)
    assert sum(isinstance(record, Commit) for _, record in rows) == 2


@pytest.mark.parametrize("presence", [AWAY, OnOff(5.0, 1.0, 3)], ids=["recorded", "on and off"])
def test_who_is_there_at_first_is_told_for_all_at_once(presence: Any) -> None:
    there, until = presence.opening(10)
    for client in range(10):
        changes = presence(client)
        assert next(changes) == (0.0, there[client])
        assert next(changes, (math.inf, None))[0] == until[client]


MILLION = """
import itertools, sys, types
package = types.ModuleType("offbeat")  # the package itself imports torch; this plane does not need it
package.__path__ = [sys.argv[1]]
sys.modules["offbeat"] = package
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.records import Arrived
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
durations = build("uniform", 1_000_000, latency=0.05).durations(0, 1e6, 1e6)
policies = {"buffer": Buffer(10, 5, 1000), "rounds": Rounds(5, 1000), "sampled": Sampled(1000, 5)}
rows = itertools.islice(VirtualClock(policies[sys.argv[2]], durations, generator(0, "policy")), int(sys.argv[3]))
print(sum(type(record) is Arrived for _, record in rows))
held = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]  # of this program alone
print("torch" in sys.modules, int(held[0]) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(("policy", "rows", "least"), [("buffer", 100_000, 20_000), ("rounds", 100_000, 20_000),
                                                       ("sampled", 1_500_000, 0)])  # fmt: skip
def test_a_million_clients_need_neither_torch_nor_a_gigabyte(policy: str, rows: int, least: int) -> None:
    source = str(Path(offbeat.__file__).parent)
    command = [sys.executable, "-c", MILLION, source, policy, str(rows)]
    arrived, torch, megabytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(arrived) >= least
    assert torch == "False"
    assert int(megabytes) < 1000


def test_a_thousand_devices_in_clusters_are_one_process() -> None:
    fleet = {"name": "straggling", "clusters": {"count": 32, "graph": "ring", "mbit": 100}}
    method, task = {"name": "hl-sgd", "local_steps": 5, "p": 0.25}, {"name": "digits", "clients": 1024, "batch_size": 1}
    done = run(Experiment(method=method, task=task, fleet=fleet, device="cpu", until={"commits": 3}))
    assert done.client_steps == 3 * 5 * 1024
    assert done.waves == 3  # a round of all clusters is one batched block
    assert done.bytes_d2d == 3 * 5 * 1024 * 2 * 650 * 4
    assert done.bytes_up == 3 * 256 * 650 * 4
