"""Clusters of a fleet: who is in them, what they take on the clock and over links, and every refusal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybrid_oracle as oracle
from offbeat import ConfigError, Experiment, run
from offbeat.experiments.assemble import Built, build
from offbeat.experiments.cluster_views import crowd as crowd_of
from offbeat.fleets.clusters import Clusters
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.make import build as build_fleet
from offbeat.fleets.timing import Timing
from offbeat.records import Arrived, Begun, Commit, Finished
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds
from offbeat.tasks.quadratic import quadratic, random_quadratic

HOUR = 3600.0
TICK = 1e-8  # s; the clock rounds every duration to one
HYBRID = ("async-hl-sgd", "gossip-pga", "gossip-sgd", "hierarchical-local-sgd", "hl-sgd")


def task_of(clients: int, dimension: int = 2) -> Any:
    return quadratic(*random_quadratic(clients, dimension, seed=1), np.ones(dimension))


def experiment(method: Any, fleet: Any, clients: int = 12, commits: int = 3, **given: Any) -> Experiment:
    usual = {"task": task_of(clients), "device": "cpu", "precision": "float64", "until": {"commits": commits}}
    return Experiment(method=method, fleet=fleet, **usual | {"evaluate": {"every_commits": 100}} | given)


def rows_of(built: Built, commits: int) -> list[Any]:
    """The clock's rows up to so many commits."""
    found, seen = [], 0
    for row in built.clock():
        found.append(row)
        seen += isinstance(row[1], Commit)
        if seen == commits:
            return found
    raise AssertionError("the clock stopped")


def seconds(method: Any, fleet: Any, clients: int = 12, commits: int = 3, **given: Any) -> float:
    return float(rows_of(build(experiment(method, fleet, clients, commits, **given)), commits)[-1][0])


def problems(method: Any, fleet: Any, clients: int = 12, **given: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build(experiment(method, fleet, clients, **given))
    return caught.value.problems


# ---- who belongs together ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "members"),
    [
        (1, [range(12)]),
        (3, [range(4), range(4, 8), range(8, 12)]),
        ({"count": 5}, [range(2), range(2, 4), range(4, 7), range(7, 9), range(9, 12)]),
        ({"count": 12}, [range(i, i + 1) for i in range(12)]),
        ({"sizes": [1, 7, 4]}, [range(1), range(1, 8), range(8, 12)]),
        ({"members": [[11, 0, 5], [1, 2, 3, 4], [10, 9, 8, 7, 6]]}, [[11, 0, 5], [1, 2, 3, 4], [10, 9, 8, 7, 6]]),
    ],
)
def test_clusters_by_count_sizes_or_members(spec: Any, members: Any) -> None:
    fleet = build_fleet("equal", 12, clusters=spec)
    assert [list(cluster.members) for cluster in fleet.clusters.each] == [list(devices) for devices in members]
    assert not fleet.problems()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_a_count_makes_clusters_as_equal_as_can_be(numbers: tuple[int, int]) -> None:
    clients, count = numbers
    fleet = build_fleet("equal", clients, clusters={"count": count, "graph": "path"})
    sizes = [cluster.size for cluster in fleet.clusters.each]
    assert (len(sizes), sum(sizes)) == (count, clients)
    assert max(sizes) - min(sizes) <= 1
    assert [device for cluster in fleet.clusters.each for device in cluster.members] == list(range(clients))


def test_every_fleet_takes_clusters_and_hlsgd_has_four_rings() -> None:
    for name in ("custom", "dlsgd-cifar10", "exponential", "lognormal", "straggling", "uniform"):
        assert len(build_fleet(name, 12, clusters=3).clusters) == 3
        assert build_fleet(name, 12).clusters is None
    paper = build_fleet("hlsgd", 32)
    assert [cluster.size for cluster in paper.clusters.each] == [8] * 4
    ring = oracle.metropolis_hastings(oracle.neighbours("ring", 8)[0])
    for cluster in paper.clusters.each:
        np.testing.assert_allclose(cluster.mixing[0], ring, rtol=0, atol=1e-15)
    assert paper.clusters.rho_max == pytest.approx(oracle.rho(ring), rel=1e-12)


def test_pace_is_a_factor_on_a_clusters_steps() -> None:
    plain = build_fleet("uniform", 12, 3, clusters={"count": 3})
    paced = build_fleet("uniform", 12, 3, clusters={"count": 3, "pace": [1.0, 2.5, 0.5]})
    np.testing.assert_allclose(paced.step_seconds, plain.step_seconds * np.repeat([1.0, 2.5, 0.5], 4), rtol=1e-15)


def test_links_are_drawn_for_pairs_and_are_the_same_both_ways() -> None:
    law = {"law": "uniform", "low": 1.0, "high": 2.0}
    spec = {"sizes": [5, 7], "latency": law, "mbit": law}
    clusters = build_fleet("equal", 12, 4, clusters=spec).clusters.each
    drawn = []
    for cluster in clusters:
        upper = np.triu_indices(cluster.size, 1)
        np.testing.assert_array_equal(cluster.latency, cluster.latency.T)
        np.testing.assert_array_equal(cluster.bandwidth, cluster.bandwidth.T)
        assert ((cluster.bandwidth >= 125e3) & (cluster.bandwidth <= 250e3)).all()  # bytes/s of 1 to 2 Mbit/s
        drawn += [*cluster.latency[upper], *cluster.edge_latency]
    assert len(set(drawn)) == len(drawn) == 10 + 21 + 12
    assert 1.0 <= min(drawn) < 1.2 < 1.8 < max(drawn) <= 2.0
    other = build_fleet("equal", 12, 4, clusters={"members": [list(range(5, 12)), list(range(5))]} | spec | {
        "sizes": None}).clusters.each  # fmt: skip
    np.testing.assert_array_equal(other[1].latency, clusters[0].latency)  # a pair keeps its link


# ---- the paper's clock ---------------------------------------------------------------------------
GRAPHS = ["ring", "complete", "star", {"name": "erdos-renyi", "p": 0.2}, {"name": "erdos-renyi", "p": 0.8}, "path"]


def largest_degree(fleet: Fleet) -> int:
    return max(degree for cluster in fleet.clusters.each for _, degree in cluster.graphs[0].degree)


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize(
    ("p", "tau", "every", "g"), [(1 / 8, 50, 1, 1), (1.0, 7, 3, 1), (0.5, 4, 2, 3), (0.25, 1, 1, 1)]
)
def test_the_clock_is_equation_2(graph: Any, p: float, tau: int, every: int, g: int) -> None:
    """c_cp = 0.01 h, c_d2d = Delta / 2 x 0.005 h, c_d2s = 8 p x 0.05 h (section 6.1)."""
    fleet = {"name": "hlsgd", "clusters": {"count": 4, "graph": graph}}
    method = {"name": "hl-sgd", "local_steps": tau, "p": p, "gossip_every": every, "gossip_rounds": g}
    degree = largest_degree(build(experiment(method, fleet, 32)).fleet)
    expected = oracle.runtime(5, tau, 0.01 * HOUR, degree / 2 * 0.005 * HOUR, 8 * p * 0.05 * HOUR, every, g)
    assert seconds(method, fleet, 32, 5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tau", [1, 10, 50])
def test_the_clock_of_local_sgd_is_the_papers(tau: int) -> None:
    """R [tau c_cp + c_d2s(p = 1)]; without gossip HL-SGD takes as long."""
    expected = oracle.runtime(5, tau, 0.01 * HOUR, 0.0, 8 * 0.05 * HOUR)
    for method in ({"name": "local-sgd", "n": None}, {"name": "hl-sgd", "gossip_rounds": 0}):
        assert seconds(method | {"local_steps": tau}, "hlsgd", 32, 5) == pytest.approx(expected, rel=1e-9)


def test_the_papers_clock_with_other_hours_and_clusters() -> None:
    hours = {"step_hours": 0.02, "d2d_hours": 0.001, "d2s_hours": 0.3}
    fleet = {"name": "hlsgd", "clusters": {"sizes": [8, 24]}, **hours}
    method = {"name": "hl-sgd", "local_steps": 6, "p": 0.25}  # 2 and 6 reports share an uplink each
    expected = oracle.runtime(3, 6, 0.02 * HOUR, 0.001 * HOUR, 6 * 0.3 * HOUR)
    assert seconds(method, fleet, 32, 3) == pytest.approx(expected, rel=1e-9)
    one = {"name": "gossip-sgd", "local_steps": 6}
    assert seconds(one, {"name": "hlsgd", "clusters": 1, **hours}, 32, 3) == pytest.approx(
        oracle.runtime(3, 6, 0.02 * HOUR, 0.001 * HOUR, 0.0), rel=1e-9
    )
    edge = {"name": "hierarchical-local-sgd", "local_steps": 6, "gossip_every": 2}  # each device up and down in turn
    assert seconds(edge, fleet, 32, 3) == pytest.approx(
        oracle.runtime(3, 6, 0.02 * HOUR, 0.001 * HOUR, 0.3 * HOUR, 2), rel=1e-9
    )


# ---- the fine clock ------------------------------------------------------------------------------
NAMED = ("complete", "exponential", "grid", "one-peer-exponential", "path", "ring", "star", "torus")
SEQUENCES = (("ring", "star"), ("one-peer-exponential", "path", "complete"))


def heard_of(graph: Any, n: int) -> list[Any]:
    names = [graph] if isinstance(graph, str) else graph["of"]
    return [turn for name in names for turn in oracle.neighbours(name, n)]


@st.composite
def fleets(draw: Any, most: int = 6) -> tuple[list[int], list[Any], Any]:
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=3))
    kinds = [*NAMED, *({"name": "sequence", "of": list(of)} for of in SEQUENCES)]
    graphs = [draw(st.sampled_from(kinds)) for _ in sizes]
    law = {"law": "uniform", "low": 0.01, "high": draw(st.sampled_from([0.02, 0.5, 3.0]))}
    clusters = {"sizes": sizes, "graphs": graphs, "latency": law, "mbit": {"law": "uniform", "low": 0.001, "high": 1.0}}
    speed = {"law": "uniform", "low": 0.1, "high": draw(st.sampled_from([0.1, 1.0, 5.0]))}
    fleet = {"name": "custom", "step_seconds": speed, "latency": speed, "up_mbit": 0.01, "clusters": clusters}
    return sizes, graphs, fleet


def block_seconds(built: Built, cluster: Any, heard: list[Any], vector: float, steps: int, had: int = 0) -> float:
    """When the last device of a cluster that has `had` so many exchanges has finished, one event after the other."""
    policy, step = built.hybrid, built.fleet.step_seconds[list(cluster.members)].tolist()
    assert policy is not None
    if policy.edge:
        to_edge = (cluster.edge_latency + vector / cluster.edge_bandwidth).tolist()
        return max(oracle.through_an_edge_server(step, to_edge, steps, policy.every, policy.rounds))
    link = lambda i, j: float(cluster.latency[i, j] + vector / cluster.bandwidth[i, j])  # noqa: E731
    return max(oracle.Simulated(step, heard, link, steps, policy.every, policy.rounds, had).run())


@settings(max_examples=50, deadline=None)
@given(fleets(), st.integers(1, 7), st.integers(1, 3), st.integers(0, 3), st.sampled_from([1.0, 0.5]), st.booleans())
def test_the_clock_is_that_of_messages(
    drawn: tuple[list[int], list[Any], Any], tau: int, every: int, g: int, p: float, edge: bool
) -> None:
    """Unequal devices and links: compute times of blocks, then every row of three rounds; graphs that change go on from
    one to the next."""
    sizes, graphs, fleet = drawn
    every, vector = min(every, tau), 2 * 8.0
    tau = tau // every * every if edge else tau
    g, p = (1, 1.0) if edge else (g, max(p, 1 / min(sizes)))
    method = {"name": "hl-sgd", "local_steps": tau, "gossip_every": every, "gossip_rounds": g, "p": p, "edge": edge}
    clients = sum(sizes)
    built = build(experiment(method, fleet, clients, seed=clients))
    durations, made = built.clock().durations, built.fleet
    ends = []
    for k, (cluster, graph) in enumerate(zip(made.clusters.each, graphs, strict=True)):
        heard = heard_of(graph, cluster.size)
        expected = [block_seconds(built, cluster, heard, vector, tau, job * (tau // every * g)) for job in range(3)]
        assert [durations.compute(k, job, tau) for job in range(3)] == pytest.approx(expected, rel=1e-12)
        members = list(cluster.members)
        down = made.down_latency[members].max()
        reports = [
            [members[place] for place in built.hybrid.reporters(clients, k, job, len(members))] for job in range(3)
        ]
        up = [max(made.up_latency[i] + vector / made.up_bandwidth[i] for i in chosen) for chosen in reports]
        ends.append([down + inside + last for inside, last in zip(expected, up, strict=True)])
    rows = rows_of(built, 3)
    commits = [time for time, record in rows if isinstance(record, Commit)]
    assert commits == pytest.approx(np.cumsum(np.max(ends, axis=0)), abs=3 * 3 * TICK)
    arrived = {record[:2]: time for time, record in rows if isinstance(record, Arrived)}
    assert [arrived[k, 0] for k in range(len(sizes))] == pytest.approx([end[0] for end in ends], abs=3 * TICK)


@pytest.mark.parametrize("name", ["ring", "path", "one-peer-exponential"])
def test_a_straggler_holds_up_its_neighbours_first(name: str) -> None:
    """Device 3 of 8 is slow: after s exchanges those up to s hops from it are late, and at last the cluster is."""
    fleet = build_fleet("equal", 8, step_seconds=1.0, clusters={"count": 1, "graph": name, "latency": 0.1})
    (cluster,) = fleet.clusters.each
    timing = Timing(cluster, Hybrid(Rounds(6)), 0.0)
    step = np.ones(8)
    step[3] = 10.0
    hops = nx.single_source_shortest_path_length(nx.compose_all(cluster.graphs), 3)
    late = []
    for steps in range(1, 7):
        alike, slow = timing.finish(np.ones(8), steps), timing.finish(step, steps)
        assert (slow >= alike - 1e-12).all()
        late.append(set(np.flatnonzero(slow > alike + 1e-9).tolist()))
        assert timing.finish(step, steps)[3] == slow.max()
        if name == "one-peer-exponential":
            continue
        assert late[-1] == {device for device, far in hops.items() if far <= steps}
        for device, far in hops.items():
            if 0 < far <= steps:  # it waits for what the straggler had done `far - 1` exchanges ago, and works since
                assert slow[device] >= (steps - far + 1) * 10 + (far - 1) * 1
    assert all(before <= after for before, after in itertools.pairwise(late))
    assert late[0] == ({3, 4} if name == "one-peer-exponential" else {2, 3, 4})
    assert late[-1] >= {3, 4}
    method = {"name": "hl-sgd", "local_steps": 6}
    object_fleet = replace(fleet, step_seconds=step)
    assert seconds(method, object_fleet, 8, 1) == pytest.approx(timing.finish(step, 6).max(), abs=3 * TICK)
    assert seconds(method, object_fleet, 8, 1) >= 60.0 > seconds(method, fleet, 8, 1)


def test_fast_links_around_a_slow_one() -> None:
    """By hand: a path 0 - 1 - 2 with links of 1 s and 5 s; the middle sends for 6 s, the ends wait for it."""
    fleet = build_fleet("equal", 3, step_seconds=2.0, clusters={"count": 1, "graph": "path"})
    (cluster,) = fleet.clusters.each
    latency = np.array([[0, 1, 9], [1, 0, 5], [9, 5, 0]], dtype=float)
    made = Timing(replace(cluster, latency=latency), Hybrid(Rounds(2)), 0.0)
    np.testing.assert_allclose(made.finish(np.array([2.0, 2.0, 2.0]), 1), [8.0, 8.0, 8.0])
    np.testing.assert_allclose(made.finish(np.array([9.0, 2.0, 2.0]), 1), [10.0, 10.0, 8.0])
    # then 9, 2, 2 s more: S = (19 + 1, 12 + 6, 10 + 5)
    np.testing.assert_allclose(made.finish(np.array([9.0, 2.0, 2.0]), 2), [20.0, 20.0, 18.0])


def test_jitter_is_drawn_for_each_device_and_job() -> None:
    jitter = {"law": "lognormal", "median": 1.0, "sigma": 1.0}
    fleet = {"name": "equal", "step_seconds": 1.0, "jitter": jitter, "clusters": {"count": 2, "graph": "complete"}}
    built = build(experiment({"name": "hl-sgd", "local_steps": 3}, fleet))
    blocks, alone = built.clock().durations, built.fleet.durations(0, 0.0, 0.0)
    for job in (0, 1, 5):
        for k, cluster in enumerate(built.fleet.clusters.each):
            slowest = max(alone.compute(device, job, 3) for device in cluster.members)
            assert blocks.compute(k, job, 3) == pytest.approx(slowest, rel=1e-12)  # all wait for it at every step
    assert len({blocks.compute(0, job, 3) for job in range(5)}) == 5


ALTERNATING = {"name": "sequence", "of": ["star", "one-peer-exponential", "path"]}


@pytest.mark.parametrize("graph", ["path", "ring", "star", "one-peer-exponential", ALTERNATING], ids=str)
@pytest.mark.parametrize("jitter", [None, 1.0])
@pytest.mark.parametrize(("tau", "every", "g"), [(1, 1, 1), (6, 2, 2)])
def test_a_look_at_gossip_sgd_waits_for_all(graph: Any, jitter: float | None, tau: int, every: int, g: int) -> None:
    """A commit is a barrier, so the clock is never faster than messages alone; without jitter and with one graph it is
    as fast, since the same device (its steps and its links) is always the last."""
    clusters = {"count": 1, "graph": graph, "latency": {"law": "uniform", "low": 0.1, "high": 2.0}}
    law = None if jitter is None else {"law": "lognormal", "median": 1.0, "sigma": jitter}
    speed = {"law": "uniform", "low": 0.5, "high": 3.0}
    fleet = {"name": "custom", "step_seconds": speed, "jitter": law, "clusters": clusters}
    fleet = {name: value for name, value in fleet.items() if value is not None}
    method = {"name": "gossip-sgd", "local_steps": tau, "gossip_every": every, "gossip_rounds": g}
    built = build(experiment(method, fleet))
    alone, now, turn = built.fleet.durations(0, 0.0, 0.0), np.zeros(12), 0
    (cluster,), heard, looks = built.fleet.clusters.each, heard_of(graph, 12), []
    for job in range(7):  # S_j = T_j + steps + sends; T_i <- max of S_j over i and those it hears
        for _ in range(tau // every):
            now = now + [alone.compute(i, job, every) for i in range(12)]
            for _ in range(g):
                hears = heard[turn % len(heard)]
                sent = [now[j] + sum(cluster.latency[j, i] for i in range(12) if j in hears[i]) for j in range(12)]
                now, turn = np.array([max(sent[j] for j in [i, *hears[i]]) for i in range(12)]), turn + 1
        looks.append(now.max())
    clock = np.array([time for time, record in rows_of(built, 7) if isinstance(record, Commit)])
    assert (clock >= np.array(looks) - 7 * TICK).all()
    assert clock[0] == pytest.approx(looks[0], abs=TICK)
    if jitter is None and len(heard) == 1:
        assert clock == pytest.approx(looks, abs=7 * TICK)


# ---- bytes and the account -----------------------------------------------------------------------
SIZES, VECTOR = (1, 2, 4, 5), 2 * 8  # bytes: two float64
SPECS: dict[str, dict[str, Any]] = {
    "async-hl-sgd": {"buffer_size": 2, "local_steps": 5, "gossip_every": 2, "gossip_rounds": 2, "p": 0.5},
    "gossip-pga": {"local_steps": 3},
    "gossip-sgd": {"local_steps": 4, "gossip_every": 2},
    "hierarchical-local-sgd": {"local_steps": 6, "gossip_every": 2},
    "hl-sgd": {"local_steps": 7, "gossip_every": 3, "gossip_rounds": 2, "p": 0.5},
}
UNEVEN = {"name": "uniform", "latency": 0.02}


def outcome(name: str, graph: Any, out: Path | None = None, commits: int = 5, **options: Any) -> tuple[Any, Built]:
    clusters = {"count": 1} if name == "gossip-sgd" else {"sizes": list(SIZES)}
    fleet = UNEVEN | {"clusters": clusters | {"graph": graph, "latency": 0.005}}
    chosen = experiment({"name": name, **SPECS[name], **options}, fleet, 12, commits)
    return run(chosen, out), build(chosen)


def counted(built: Built, commits: int) -> dict[str, float]:
    """Messages and updates counted one by one from the rows of the clock."""
    policy, clusters = built.hybrid, built.fleet.clusters.each
    assert policy is not None
    found = dict.fromkeys(("bytes_up", "bytes_down", "bytes_d2d", "client_steps"), 0)
    had = [0] * len(clusters)  # exchanges
    for _, record in rows_of(built, commits):
        if not isinstance(record, Begun | Finished | Arrived):
            if type(record).__name__ == "Start" and policy.server:
                found["bytes_down"] += VECTOR * clusters[record.client].size
            continue
        cluster = clusters[record.client]
        if isinstance(record, Finished):
            steps = policy.orders
            found["client_steps"] += steps * cluster.size
            if policy.edge:
                found["bytes_d2d"] += 2 * cluster.size * (steps // policy.every) * policy.rounds * VECTOR
            else:
                heard = [[sorted(graph.predecessors(i) if graph.is_directed() else graph.adj[i])
                          for i in range(cluster.size)] for graph in cluster.graphs]  # fmt: skip
                args = [1.0] * cluster.size, heard, lambda i, j: 1.0, steps, policy.every, policy.rounds
                sim = oracle.Simulated(*args, had[record.client])
                sim.run()
                had[record.client] += steps // policy.every * policy.rounds
                found["bytes_d2d"] += sim.messages * VECTOR
        elif isinstance(record, Arrived) and policy.server:
            many = 1 if policy.edge else max(1, int(policy.sample * cluster.size + 0.5))
            found["bytes_up"] += VECTOR * many
    return found


@pytest.mark.parametrize("graph", ["ring", "star", "one-peer-exponential", {"name": "erdos-renyi", "p": 0.7}], ids=str)
@pytest.mark.parametrize("name", HYBRID)
def test_bytes_and_steps_against_a_count_of_messages(name: str, graph: Any) -> None:
    made, built = outcome(name, graph)
    for what, many in counted(built, 5).items():
        assert made.result[what] == many, what
    assert (made.result["bytes_up"] == 0) == (made.result["bytes_down"] == 0) == (name == "gossip-sgd")


def test_bytes_by_hand() -> None:
    """Rings of 1, 2, 4 and 5 have 0, 2, 8 and 10 directed links."""
    per_exchange = 0 + 2 + 8 + 10
    made = outcome("hl-sgd", "ring")[0].result  # 7 steps: exchanges after 3 and 6, two in a row
    assert made["bytes_d2d"] == 5 * 4 * per_exchange * VECTOR
    assert made["bytes_up"] == 5 * (1 + 1 + 2 + 3) * VECTOR  # half of the devices, 2.5 is 3
    assert made["bytes_down"] == 5 * 12 * VECTOR
    assert made["client_steps"] == made["samples"] == 5 * 12 * 7
    pga = outcome("gossip-pga", "ring")[0].result
    assert (pga["bytes_d2d"], pga["bytes_up"], pga["bytes_down"]) == (
        5 * 3 * per_exchange * VECTOR, 5 * 12 * VECTOR, 5 * 12 * VECTOR)  # fmt: skip
    edge = outcome("hierarchical-local-sgd", "unlinked")[0].result  # two vectors per device and exchange, three a round
    assert (edge["bytes_d2d"], edge["bytes_up"], edge["bytes_down"]) == (
        5 * 3 * 2 * 12 * VECTOR, 5 * 4 * VECTOR, 5 * 12 * VECTOR)  # fmt: skip
    gossip = outcome("gossip-sgd", "ring")[0].result  # a ring of twelve, two exchanges a commit
    assert (gossip["bytes_d2d"], gossip["bytes_up"], gossip["bytes_down"]) == (5 * 2 * 24 * VECTOR, 0, 0)


@pytest.mark.parametrize("name", [name for name in HYBRID if name != "hierarchical-local-sgd"])
@pytest.mark.parametrize("tau", [2, 4, 10])
def test_bytes_of_graphs_that_change(name: str, tau: int) -> None:
    """A path, a star, a complete graph; where a job has no whole number of turns, the next goes on with the rest."""
    graph = {"name": "sequence", "of": ["path", "one-peer-exponential", "complete"]}
    made, built = outcome(name, graph, local_steps=tau, gossip_every=2)
    for what, many in counted(built, 5).items():
        assert made.result[what] == many, what


def test_bytes_of_graphs_that_change_by_hand() -> None:
    """Twelve devices; a star has 22 directed links, a complete graph 132: three exchanges a commit, then four."""
    graph = {"name": "sequence", "of": ["star", "complete"]}
    for tau, commits, models in ((3, 1, 2 * 22 + 132), (3, 2, 3 * (22 + 132)), (3, 3, 5 * 22 + 4 * 132),
                                 (4, 1, 2 * (22 + 132))):  # fmt: skip
        made, _ = outcome("gossip-sgd", graph, commits=commits, local_steps=tau, gossip_every=1)
        assert made.result["bytes_d2d"] == models * VECTOR


def test_what_stands_behind_a_row_that_speaks_of_a_cluster() -> None:
    clusters = {"members": [[5, 0], [3, 1, 4, 2]], "graph": {"name": "sequence", "of": ["path", "ring"]}}
    jitter = {"law": "lognormal", "median": 1.0, "sigma": 0.7}
    fleet = {"name": "equal", "step_seconds": 0.5, "jitter": jitter, "clusters": clusters}
    built = build(experiment({"name": "hl-sgd", "local_steps": 3, "p": 0.5}, fleet, 6))
    alone, crowd = built.fleet.durations(0, 0.0, 0.0), crowd_of(built.fleet, built.hybrid, 0, 7.0)
    assert [list(devices) for devices in crowd.members] == [[5, 0], [3, 1, 4, 2]]
    assert (list(crowd.reports), crowd.server) == ([1, 2], True)
    for job in range(4):
        places = built.hybrid.reporters(0, 1, job, 4)
        assert list(crowd.behind(1, job)) == [[3, 1, 4, 2][place] for place in places]
        assert crowd.computing(1, job, 3) == pytest.approx(sum(alone.compute(i, job, 3) for i in (1, 2, 3, 4)))
        path, ring = (2, 1) if job % 2 == 0 else (1, 2)  # of three exchanges; a path has 6 directed links, a ring 8
        assert crowd.exchanged(1, job, 3) == 7.0 * (6 * path + 8 * ring)
        assert crowd.exchanged(0, job, 3) == 7.0 * 3 * 2
    edge = build(experiment({"name": "hierarchical-local-sgd", "local_steps": 4, "gossip_every": 2}, fleet, 6))
    crowd = crowd_of(edge.fleet, edge.hybrid, 0, 7.0)
    assert list(crowd.reports) == [1, 1]
    assert [list(crowd.behind(k, 3)) for k in (0, 1)] == [[5, 0], [3, 1, 4, 2]]
    assert [crowd.exchanged(k, 3, 4) for k in (0, 1)] == [7.0 * 2 * 2 * 2, 7.0 * 2 * 2 * 4]
    assert not crowd_of(build(experiment("gossip-sgd", {"name": "equal", "clusters": 1})).fleet,
                        Hybrid(Rounds(3), server=False), 0, 7.0).server  # fmt: skip


@pytest.mark.parametrize("name", HYBRID)
def test_participation_is_told_for_every_device(name: str, tmp_path: Path) -> None:
    """Updates by device: those drawn by the policy for each job that a commit took, all behind an edge server."""
    made, built = outcome(name, "ring", tmp_path)
    policy, clusters = built.hybrid, built.fleet.clusters.each
    counts = [0] * 12
    for _, record in rows_of(built, 5):
        for k, job in record.jobs if isinstance(record, Commit) else ():
            places = range(clusters[k].size) if policy.edge else policy.reporters(0, k, job, clusters[k].size)
            for place in places:
                counts[clusters[k].members[place]] += 1
    table = pq.read_table(tmp_path / "clients.parquet").to_pylist()
    assert table == [{"client": i, "updates": counts[i]} for i in range(12)]
    told = made.result["participation"]
    assert (told["min"], told["max"], told["never"]) == (min(counts), max(counts), counts.count(0))
    assert told["mean"] == pytest.approx(sum(counts) / 12)
    if name in ("gossip-pga", "gossip-sgd", "hierarchical-local-sgd"):
        assert counts == [5] * 12


def test_behind_an_edge_servers_report_are_all_of_its_devices() -> None:
    told = outcome("hierarchical-local-sgd", "ring")[0].result["participation"]
    assert told == {"min": 5, "mean": 5.0, "max": 5, "never": 0}


def test_the_drawn_devices_change_and_all_have_their_turn() -> None:
    policy, counts = Hybrid(Rounds(1), sample=0.4), np.zeros(5)
    for job in range(500):
        drawn = policy.reporters(3, 1, job, 5)
        assert drawn == sorted(set(drawn))
        assert len(drawn) == policy.reports(5) == 2
        counts[drawn] += 1
    assert (np.abs(counts - 200) < 5 * np.sqrt(500 * 0.4 * 0.6)).all()  # five standard deviations
    assert Hybrid(Rounds(1), sample=1 / 8).reports(8) == 1
    assert [policy.reporters(3, 0, j, 5) for j in range(20)] != [policy.reporters(3, 1, j, 5) for j in range(20)]
    assert [policy.reporters(3, 0, j, 5) for j in range(20)] != [policy.reporters(4, 0, j, 5) for j in range(20)]


@pytest.mark.parametrize("name", HYBRID)
def test_the_idle_share_is_a_share(name: str) -> None:
    made, _ = outcome(name, "star", commits=3)
    assert 0 < made.result["idle_share"] < 1


def test_nobody_is_idle_where_all_are_alike_and_links_take_no_time() -> None:
    for name in ("hl-sgd", "gossip-pga", "hierarchical-local-sgd"):
        fleet = {"name": "equal", "clusters": {"sizes": list(SIZES)}}
        assert run(experiment({"name": name, **SPECS[name]}, fleet)).result["idle_share"] == pytest.approx(0, abs=1e-12)


def test_the_idle_share_of_equal_clusters_by_hand() -> None:
    """Two of three devices compute for 1 s of every step that the third makes 3 s long."""
    fleet = build_fleet("equal", 6, clusters={"count": 2, "graph": "complete"})
    fleet = replace(fleet, step_seconds=np.array([1.0, 1.0, 3.0] * 2))
    made = run(experiment({"name": "hl-sgd", "local_steps": 4}, fleet, 6)).result
    assert made["idle_share"] == pytest.approx(1 - 5 / 9)


def test_the_idle_share_counts_devices() -> None:
    """One device works all the time of a round, five work half of it."""
    fleet = build_fleet("equal", 6, clusters={"sizes": [1, 5], "graph": "complete"})
    fleet = replace(fleet, step_seconds=np.array([2.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    made = run(experiment({"name": "hl-sgd", "local_steps": 4}, fleet, 6)).result
    assert made["idle_share"] == pytest.approx(1 - (2 + 5 * 1) / (6 * 2))


def test_a_run_may_stop_at_bytes_between_devices() -> None:
    fleet = {"name": "equal", "clusters": 3}
    chosen = experiment("hl-sgd", fleet, until={"bytes_d2d": 2.5 * 10 * 24 * VECTOR, "commits": 50})
    assert run(chosen).commits == 3


# ---- refusals ------------------------------------------------------------------------------------
def clustered(**spec: Any) -> dict[str, Any]:
    return {"name": "equal", "clusters": spec}


ROWS = [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0.25, 0.25, 0.5], [0, 0, 0.5, 0.6]]
SKEW = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0.25, 0.25, 0.5], [0, 0, 0.5, 0.5]]  # rows are right, columns not
TWO_PAIRS = {"name": "edges", "edges": [[0, 1], [2, 3]]}
BAD_FLEETS: dict[str, tuple[Any, list[str]]] = {
    "disconnected": (
        clustered(count=3, graph=TWO_PAIRS),
        [f"cluster {k}: the linked clients fall into 2 parts, the smallest of them clients {4 * k}, {4 * k + 1}"
         for k in range(3)],
    ),
    "device without a link": (
        clustered(count=3, graph={"name": "edges", "edges": [[0, 1], [1, 2]]}),
        [f"cluster {k}: no link in any graph for client {4 * k + 3}; link every client" for k in range(3)],
    ),
    "row sum": (clustered(count=3, weights=ROWS), ["cluster 0: the row of client 3 sums to 1.1, off by +0.1",
                                                   "cluster 2: the column of client 11 sums to 1.1, off by +0.1"]),
    "column sums": (
        clustered(count=3, graph="path", weights=SKEW),
        ["the column of client 1 sums to 1.25, off by +0.25", "the column of client 2 sums to 0.75, off by -0.25"],
    ),
    "weight without a link": (
        clustered(count=3, graph="path", weights=[[0.5, 0, 0.5, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 1]]),
        ["cluster 1: in the row of client 4 the weight of client 6 is 0.5, but no link carries its model"],
    ),
    "negative weight": (
        clustered(count=1, graph="complete", weights=(np.eye(12) * 2 - np.roll(np.eye(12), 1, 0)).tolist()),
        ["in the row of client 1 the weight of client 0 is -1; give a finite number >= 0"],
    ),
    "weights of another size": (clustered(count=3, weights=[[1, 0], [0, 1]]),
                                ["cluster 0: weights of shape (2, 2) for 4 clients"]),
    "too few matrices": (clustered(count=3, weights=[np.eye(4).tolist()] * 2), ["a matrix, nor 3 matrices"]),
    "ragged weights": (clustered(count=3, weights=[[1, 0], [1]]), ["weights are neither a rule", "3 matrices"]),
    "weights of words": (clustered(count=3, weights=["a", "b"]), ["weights are neither a rule"]),
    "unknown weights": (clustered(count=3, weights="metroplis"), ["'metroplis': did you mean 'metropolis'?"]),
    "overlap": (clustered(members=[[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10, 11]]),
                ["clusters overlap: client 5 more than once (client 5 in [0, 1])"]),
    "missing": (clustered(members=[[0, 1, 2], [4, 5, 6, 7, 8, 9, 10]]),
                ["clusters miss client 3, 11; every client belongs to one"]),
    "strange": (clustered(members=[list(range(6)), list(range(6, 14))]),
                ["clusters name client 12, 13, but the fleet has clients 0 to 11"]),
    "negative client": (clustered(members=[list(range(12)), [-1]]), ["clusters name client -1, but the fleet has"]),
    "an empty cluster": (clustered(members=[list(range(12)), []]), ["cluster 1"]),
    "no members": (clustered(members=[]), ["members = []; give a list of clients for each cluster"]),
    "members that are no lists": (clustered(members=[0, 1]), ["members = [0, 1]; give a list of clients"]),
    "members that are no clients": (clustered(members=[[0, "a"], [True]]), ["give a list of clients for each cluster"]),
    "count of none": (clustered(count=0), ["count = 0; it must be between 1 and the 12 clients"]),
    "too many": ({"name": "equal", "clusters": 13}, ["count = 13; it must be between 1 and the 12 clients"]),
    "a part": ({"name": "equal", "clusters": 2.5}, ["clusters = 2.5; it must be a whole number or a table"]),
    "no number": ({"name": "equal", "clusters": True}, ["clusters = True; it must be a whole number or a table"]),
    "nothing": (clustered(), ["give a number of clusters, or a table with count, sizes or members"]),
    "no way": (clustered(graph="ring"), ["nothing given; say one of count, sizes, members"]),
    "two ways": (clustered(count=3, sizes=[4, 4, 4]), ["count and sizes given; say one of count, sizes, members"]),
    "sizes": (clustered(sizes=[4, 4]), ["sizes = [4, 4]; give numbers of devices that sum to the 12 clients"]),
    "size of none": (clustered(sizes=[12, 0]), ["sizes = [12, 0]; give numbers of devices that sum to the 12"]),
    "no sizes": (clustered(sizes=[]), ["sizes = []; give numbers of devices that sum to the 12"]),
    "sizes no list": (clustered(sizes=12), ["sizes = 12; it must be a list"]),
    "unknown option": (clustered(cont=3), ["unknown option of clusters 'cont': did you mean 'count'?"]),
    "unknown graph": (clustered(count=3, graphs=["ring", "rng", "star"]), ["cluster 1: unknown graph 'rng': did you"]),
    "graph of no kind": (clustered(count=3, graph=5), ["graph = 5; it must be a text or a table"]),
    "graph without its option": (clustered(count=3, graph="erdos-renyi"), ["p is missing; it has no default"]),
    "edge of nobody": (clustered(count=3, graph={"name": "edges", "edges": [[0, 4]]}),
                       ["cluster 2: graph 'edges': entry 0 of edges is [0, 4]; give a pair of different node numbers"]),
    "too few graphs": (clustered(count=3, graphs=["ring"]), ["1 graphs for 3 clusters; give one for each"]),
    "graph and graphs": (clustered(count=3, graph="ring", graphs=["ring"] * 3), ["graph is for all clusters, graphs"]),
    "too few paces": (clustered(count=3, pace=[1.0]), ["1 pace for 3 clusters; give one for each"]),
    "bad paces": (clustered(count=3, pace=[0, -1.0, "fast"]), ["pace = 0; it must be a finite number > 0",
                                                              "pace = -1.0; it must", "pace = 'fast'; it must"]),
    "pace no list": (clustered(count=3, pace=2.0), ["pace = 2.0; it must be a list"]),
    "latency": (clustered(count=3, latency=-1.0), ["clusters: latency = -1.0; it must be a finite number >= 0"]),
    "unknown law": (clustered(count=3, latency={"law": "unifrm"}), ["'unifrm': did you mean 'uniform'?"]),
    "mbit": (clustered(count=3, mbit=0), ["clusters: mbit = 0; it must be a finite number > 0"]),
    "shared uplink": (clustered(count=3, shared_uplink=1), ["shared_uplink = 1; it must be true or false"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FLEETS)
def test_each_bad_fleet_gets_its_sentences(case: str) -> None:
    fleet, wanted = BAD_FLEETS[case]
    found = problems("hl-sgd", fleet)
    for sentence in wanted:
        assert any(sentence in problem for problem in found), found


def test_a_cluster_without_devices_is_named_as_such() -> None:
    assert any("cluster 1 has no devices" in said for said in problems("hl-sgd", BAD_FLEETS["an empty cluster"][0]))


THREE = {"name": "equal", "clusters": 3}
OF_P = "hybrid: p = {}; it is the share of a cluster's devices that report, above 0 and at most 1"
DIVIDES = "models are exchanged after every 3 steps, and a commit looks after 10: the one must divide the other"
ONE_MEAN = "hybrid: an edge server takes one mean and reports for all, so gossip_rounds = {} and p = {} have no meaning"
WHEN = {"policy": "hybrid", "between": {"policy": "rounds", "steps": 4}}
BAD_METHODS: dict[str, tuple[Any, Any, list[str]]] = {
    "p of zero": ({"name": "hl-sgd", "p": 0.0}, THREE, [OF_P.format(0.0)]),
    "p above one": ({"name": "async-hl-sgd", "p": 1.1}, THREE, [OF_P.format(1.1)]),
    "gossip without links": ("hl-sgd", clustered(count=3, graph="unlinked"),
                             [f"cluster {k}: none of its 4 devices has a link, so they can" for k in range(3)]),
    "no clusters": ("hl-sgd", "equal", ["hl-sgd needs a fleet with clusters; give it some"]),
    "no clusters for gossip": ("gossip-sgd", "uniform", ["gossip-sgd needs a fleet with clusters"]),
    "lost jobs": ("hl-sgd", THREE | {"drop_out": 0.1}, ["clients of this fleet come and go or lose jobs"]),
    "coming and going": ("async-hl-sgd", {"name": "custom", "clusters": 3, "mean_on": 1.0, "mean_off": 1.0},
                         ["async-hl-sgd: a cluster steps with all of its devices, but clients of this fleet come and"]),
    "several networks": ("gossip-sgd", THREE, ["gossip-sgd: without a server the models of 3 clusters never meet"]),
    "first gradients": ({"name": "scaffold", "start": "gradients", "when": WHEN, "experimental": True}, THREE,
                        ["scaffold: its rule looks at clients one by one, and a policy of clusters does not show"]),
    "whole shards": ({"name": "scaffold", "option": "I", "when": WHEN, "experimental": True}, THREE,
                     ["scaffold: its rule looks at clients one by one"]),
    "kept vectors": ({"name": "fedagrac", "when": WHEN, "experimental": True}, THREE,
                     ["fedagrac: its rule looks at clients one by one"]),
    "other policies": ({"name": "scaffold", "when": WHEN}, THREE, ["'rounds', not for 'hybrid rounds'"]),
    "never": ({"name": "hl-sgd", "gossip_every": 11}, THREE, ["exchanged after every 11 of 10 steps: never"]),
    "edge in between": ({"name": "hierarchical-local-sgd", "gossip_every": 3}, THREE, [DIVIDES]),
    "a look in between": ({"name": "gossip-sgd", "gossip_every": 3}, {"name": "equal", "clusters": 1}, [DIVIDES]),
    "edge without a mean": ({"name": "hl-sgd", "edge": True, "gossip_rounds": 0}, THREE, [ONE_MEAN.format(0, 1)]),
    "edge with two means": ({"name": "hl-sgd", "edge": True, "gossip_rounds": 2}, THREE, [ONE_MEAN.format(2, 1)]),
    "edge with p": ({"name": "hl-sgd", "edge": True, "p": 0.5}, THREE, [ONE_MEAN.format(1, 0.5)]),
    "hybrid in hybrid": ({"name": "hl-sgd", "when": {"policy": "hybrid", "between": WHEN}, "experimental": True}, THREE,
                         ["hybrid: between is hybrid itself; clusters of clusters are not known here"]),
    "no server here": ({"name": "gossip-sgd", "when": WHEN}, {"name": "equal", "clusters": 1},
                       ["gossip-sgd is defined for the policy 'hybrid rounds without server', not for 'hybrid r"]),
    "a server here": ({"name": "hl-sgd", "when": WHEN | {"server": False}}, {"name": "equal", "clusters": 1},
                      ["hl-sgd is defined for the policy 'hybrid rounds', not for 'hybrid rounds without server'"]),
    "what is remembered": ({"name": "scaffold", "when": WHEN, "experimental": True}, THREE,
                           ["scaffold: its rule looks at clients one by one, and a policy of clusters does not show"]),
    "a step law, steps by default": ("hl-sgd", THREE | {"local_steps": [1, 2, 3] * 4},
                                     ["hl-sgd orders local_steps = 10 of everyone, but the fleet has a step law"]),
    "own steps": ({"name": "hl-sgd", "when": {"policy": "hybrid", "between": "rounds"}}, THREE,
                  ["the devices of a cluster step together; give the number of local steps"]),
    "no policy between": ({"name": "hl-sgd", "when": {"policy": "hybrid"}}, THREE, ["between is missing"]),
    "unknown policy between": ({"name": "hl-sgd", "when": {"policy": "hybrid", "between": "round"}}, THREE,
                               ["unknown policy 'round': did you mean 'rounds'?"]),
    "no exchanges": ({"name": "hl-sgd", "gossip_every": 0}, THREE, ["every = 0; devices exchange models after 1"]),
    "fewer than none": ({"name": "hl-sgd", "gossip_rounds": -1}, THREE, ["rounds = -1; devices exchange models 0"]),
    "no steps": ({"name": "hl-sgd", "local_steps": 0, "gossip_rounds": 0}, THREE, ["local steps = 0; a job needs"]),
    "a large buffer": ({"name": "async-hl-sgd", "buffer_size": 4}, THREE, ["size = 4 is larger than the 3"]),
    "other weights": ({"name": "hl-sgd", "weights": [0.5, 0.5]}, THREE, ["weights of 2", "give one for each"]),
    "fixed option": ({"name": "gossip-pga", "p": 0.5}, THREE, ["unknown option of gossip-pga 'p'"]),
    "schedule said twice": ({"name": "hl-sgd", "p": 0.5, "when": WHEN}, THREE, ["p has no effect with when"]),
    "a step law": ({"name": "hl-sgd", "local_steps": 4}, THREE | {"local_steps": [1, 2, 3] * 4},
                   ["hl-sgd orders local_steps = 4 of everyone, but the fleet has a step law"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_METHODS)
def test_each_bad_method_gets_its_sentences(case: str) -> None:
    method, fleet, wanted = BAD_METHODS[case]
    found = problems(method, fleet)
    for sentence in wanted:
        assert any(sentence in problem for problem in found), found


def test_scaffold_under_a_policy_of_clusters_is_refused() -> None:
    method = {"name": "scaffold", "when": WHEN, "experimental": True}
    assert any("looks at clients one by one" in said for said in problems(method, THREE))


def test_a_step_law_that_nobody_follows_is_refused() -> None:
    assert any("step law" in said for said in problems("hl-sgd", THREE | {"local_steps": [1, 2, 3] * 4}))


def test_an_edge_server_takes_no_p() -> None:
    assert problems({"name": "hl-sgd", "edge": True, "p": 0.5}, THREE)


@pytest.mark.parametrize(("name", "server"), [("gossip-sgd", True), ("hl-sgd", False)])
def test_a_policy_with_or_without_a_server_is_not_the_methods_own(name: str, server: bool) -> None:
    method = {"name": name, "when": WHEN | {"server": server}}
    assert problems(method, {"name": "equal", "clusters": 1})


def test_several_problems_are_told_at_once() -> None:
    """Method, policy, rule, task-free values and the fleet's clusters, all in one error."""
    method = {"name": "hl-sgd", "p": 1.5, "gossip_every": 20}
    fleet = {"name": "custom", "clusters": {"count": 3, "graph": "unlinked"}, "mean_on": 1.0, "mean_off": 1.0}
    found = problems(method, fleet, precision="float16", until={"commits": 0})
    for part in ("precision = 'float16'", "until.commits = 0", "exchanged after every 20 of 10 steps", "come and go",
                 "cluster 0: none of its 4 devices has a link", "hybrid: p = 1.5"):  # fmt: skip
        assert any(part in problem for problem in found), (part, found)

    spec = {"count": 3, "graphs": ["rng", {"name": "erdos-renyi"}, "ring"], "weights": "metro", "pace": [1.0, 0, -1],
            "latency": -1.0, "mbit": 0}  # fmt: skip
    found = problems({"name": "hl-sgd", "p": 2.0, "gossip_rounds": -1}, {"name": "equal", "clusters": spec})
    for part in ("unknown graph 'rng'", "p is missing", "'metro'", "pace = 0", "pace = -1", "latency = -1.0",
                 "mbit = 0", "p = 2.0", "rounds = -1"):  # fmt: skip
        assert any(part in problem for problem in found), (part, found)

    members = {"members": [[0, 1, 2, 3], [3, 4, 5, 6], [7, 8, 20]], "weights": np.eye(4).tolist()}
    found = problems("hl-sgd", {"name": "equal", "clusters": members})
    for part in ("clusters overlap: client 3", "clusters miss client 9, 10, 11", "clusters name client 20",
                 "cluster 2: weights of shape (4, 4) for 3 clients"):  # fmt: skip
        assert any(part in problem for problem in found), (part, found)


HIDING: list[Any] = [
    (clustered(count=20, weights="metro", graph="ring"), ["count = 20", "'metro'"]),
    (clustered(count=20, graph="rng"), ["count = 20", "'rng'"]),
    (clustered(count=20, weights="metro", graph="rng"), ["count = 20", "'metro'", "'rng'"]),
    (clustered(count=3, weigths="metropolis", pace=[-1.0, 1.0, 1.0]), ["'weigths'", "pace = -1.0"]),
    ({"name": "equal", "step_second": 1.0, "clusters": {"count": 20}}, ["'step_second'", "count = 20"]),
    ({"name": "hlsgd", "step_hours": -1.0, "clusters": {"count": 20}}, ["step_hours = -1", "count = 20"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fleet", "wanted"), HIDING, ids=["weights", "graphs", "both", "unknown option", "fleet option", "hours"]
)
def test_a_first_problem_does_not_hide_the_others(fleet: Any, wanted: Sequence[str]) -> None:
    found = problems("hl-sgd", fleet)
    assert all(any(part in problem for problem in found) for part in wanted), found


@pytest.mark.parametrize("bad", [{"step_hour": 1.0}, {"clusters": 2.5}])
def test_one_problem_of_hlsgd_is_one_sentence(bad: dict[str, Any]) -> None:
    assert len(problems("hl-sgd", {"name": "hlsgd", **bad})) == 1


@pytest.mark.parametrize("server", [True, False])
def test_the_kind_of_a_hybrid_policy_says_whether_there_is_a_server(server: bool) -> None:
    said = "" if server else " without server"
    assert Hybrid(Rounds(3), server=server).kind == f"hybrid rounds{said}"
    assert Hybrid(Rounds(3)).kind == "hybrid rounds"


def test_clusters_made_in_python_are_checked_too() -> None:
    fleet = build_fleet("equal", 12, clusters=3)
    first, second, third = fleet.clusters.each
    bad = replace(first, latency=first.latency - 1), replace(second, bandwidth=np.zeros((4, 4)))
    found = problems("hl-sgd", replace(fleet, clusters=Clusters((*bad, third, replace(third, members=())))))
    for pattern in ("cluster 0: d2d latency has -1.0 to", "cluster 1: d2d bandwidth has .* a link must carry more",
                    "cluster 3 has no devices; leave it out"):  # fmt: skip
        assert any(re.search(pattern, problem) for problem in found), (pattern, found)


def test_at_least_one_device_of_a_cluster_reports() -> None:
    """m = max(p n, 1), line 13 of Algorithm 1: p = 0.05 of 8 devices is one report."""
    assert [Hybrid(Rounds(4), sample=p).reports(8) for p in (0.01, 0.05, 0.125, 0.25, 1.0)] == [1, 1, 1, 2, 8]
    build(
        Experiment(
            method={"name": "hl-sgd", "p": 0.05}, task={"name": "digits", "clients": 32}, fleet="hlsgd", device="cpu"
        )
    )
