"""Clusters: the methods against a second implementation, the laws between them, where they end, and the engine."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hybrid_oracle as oracle
from offbeat import Experiment, replay, resume, run
from offbeat.engines.engine import Engine
from offbeat.errors import BadNumbers
from offbeat.experiments.assemble import build_method
from offbeat.fleets.make import build as build_fleet
from offbeat.keys import generator
from offbeat.numerics.mixing import Blocks, Mixer
from offbeat.records import Begun
from offbeat.runs.loop import Interrupted
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.hybrid import Hybrid
from offbeat.tasks.quadratic import optimum, quadratic, random_quadratic
from stopped_runs import InterruptAt, figures, killed_process, same_bits
from worlds import Times, engine_of, final, play, quadratic_world, times

HYBRID = ("async-hl-sgd", "gossip-pga", "gossip-sgd", "hierarchical-local-sgd", "hl-sgd")
DRAWN = ("erdos-renyi", "regular")
NAMED = ("complete", "exponential", "grid", "one-peer-exponential", "path", "ring", "star", "torus")
modes = pytest.mark.parametrize("mode", ["wave", "reference"])


def close(a: Any, b: Any, atol: float = 1e-11) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert np.allclose(a, b, rtol=0, atol=atol), np.abs(a - b).max()


def exact(clients: int, dimension: int = 3, seed: int = 11, shards: Sequence[int] = ()) -> Any:
    """Exact gradients; client i has its one sample as often as `shards` says."""
    task = quadratic(*random_quadratic(clients, dimension, seed=seed), np.ones(dimension))
    return replace(task, shards=[np.full(size, i) for i, size in enumerate(shards)]) if shards else task


def constant_pull(linear: np.ndarray) -> Any:
    """f_i = -b_i' w: the gradient is the same everywhere."""
    n, d = linear.shape
    return quadratic([np.zeros((d, d))] * n, list(linear), np.ones(d))


# ---- random instances ----------------------------------------------------------------------------
@st.composite
def graph_spec(draw: Any, n: int, deep: bool = True) -> Any:
    name = draw(st.sampled_from([*NAMED, *DRAWN, "edges", *(["sequence"] if deep else [])]))
    if name == "erdos-renyi":
        return {"name": name, "p": draw(st.floats(0.6, 1.0))}
    if name == "regular":
        return {"name": name, "degree": min(2, n - 1) or 1}
    if name == "edges":  # a tree
        return {"name": name, "edges": [[i, draw(st.integers(0, i - 1))] for i in range(1, n)]}
    if name == "sequence":
        return {"name": name, "of": draw(st.lists(graph_spec(n, False), min_size=1, max_size=3))}
    return name


def heard_of(spec: Any, made: Sequence[Any], n: int) -> list[list[list[int]]]:
    """Who hears whom, by hand where the graph is not drawn; the drawn ones as the fleet has them."""
    made = list(made)
    name, options = (spec, {}) if isinstance(spec, str) else (spec["name"], spec)
    if name == "sequence":
        found = []
        for part in options["of"]:
            mine = heard_of(part, made, n)
            made = made[len(mine) :]
            found += mine
        return found
    if name == "edges":
        both = {(i, j) for i, j in options["edges"]} | {(j, i) for i, j in options["edges"]}
        return [[sorted(j for j in range(n) if (i, j) in both) for i in range(n)]]
    if name in DRAWN:
        return [[sorted(made[0].adj[i]) for i in range(n)]]
    return oracle.neighbours(name, n)


@st.composite
def worlds(draw: Any, most: int = 4, clusters: int = 4) -> dict[str, Any]:
    """Clusters of unequal sizes, their clients in any order; the spec for the fleet, and matrices by hand."""
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=clusters))
    order = draw(st.permutations(range(sum(sizes))))
    ends = np.cumsum([0, *sizes])
    members = [list(order[a:b]) for a, b in itertools.pairwise(ends)]
    graphs = [draw(graph_spec(n)) for n in sizes]
    weights = draw(st.sampled_from(["metropolis", "max-degree"]))
    spec = {"members": members, "graphs": graphs, "weights": weights}
    fleet = build_fleet("equal", sum(sizes), clusters=spec)
    rule = oracle.metropolis_hastings if weights == "metropolis" else oracle.max_degree
    heard = [heard_of(g, c.graphs, n) for g, c, n in zip(graphs, fleet.clusters.each, sizes, strict=True)]
    return {
        "sizes": sizes, "members": members, "spec": spec, "mixing": [[rule(h) for h in turns] for turns in heard],
        "shards": draw(st.lists(st.integers(1, 3), min_size=sum(sizes), max_size=sum(sizes))),
    }  # fmt: skip


def enough(p: float, sizes: Sequence[int]) -> float:
    """p, or as much as a report of every cluster needs."""
    return max(p, 1 / min(sizes)) if min(math.floor(p * n + 0.5) for n in sizes) < 1 else p


class Instance:
    """A drawn world with its task, and the arguments of the oracle."""

    def __init__(self, drawn: dict[str, Any], seed: int = 11) -> None:
        self.sizes, self.members = drawn["sizes"], drawn["members"]
        self.spec, self.mixing, self.shards = drawn["spec"], drawn["mixing"], drawn["shards"]
        self.total = sum(self.sizes)
        self.matrices, self.linear = random_quadratic(self.total, 3, seed=seed)
        self.task = exact(self.total, 3, seed, self.shards)
        self.times = times(len(self.sizes))

    def quadratics(self) -> tuple[Any, ...]:
        return self.matrices, self.linear, self.members, self.mixing, np.ones(3)

    def final(self, spec: dict[str, Any], commits: int, mode: str) -> np.ndarray:
        return final(spec, self.task, self.times, commits, mode=mode, clusters=self.spec).numpy()


# ---- against the second implementation -----------------------------------------------------------
@settings(max_examples=20, deadline=None)
@given(
    worlds(),
    st.integers(1, 7).flatmap(lambda tau: st.tuples(st.just(tau), st.integers(1, tau))),
    st.integers(0, 3),
    st.sampled_from([1.0, 0.7, 0.5, 0.3]),
    st.sampled_from(["uniform", "size"]),
    st.sampled_from(["wave", "wave", "reference"]),
)
def test_hl_sgd(drawn: Any, period: tuple[int, int], g: int, p: float, weights: str, mode: str) -> None:
    world, (tau, every), p = Instance(drawn), period, enough(p, drawn["sizes"])
    sampled = Hybrid(None, sample=p).reporters  # type: ignore[arg-type]
    parts = [sum(world.shards[i] for i in members) / sum(world.shards) for members in world.members]
    expected = oracle.hl_sgd(
        *world.quadratics(), 3, tau, 0.15, every, g, lambda k, r: sampled(0, k, r, world.sizes[k]), 0.9,
        parts if weights == "size" else None,
    )[-1]  # fmt: skip
    spec = {
        "name": "hl-sgd", "local_steps": tau, "client_lr": 0.15, "gossip_every": every, "gossip_rounds": g, "p": p,
        "server_lr": 0.9, "weights": weights,
    }  # fmt: skip
    close(world.final(spec, 3, mode), expected)


@modes
@pytest.mark.parametrize(("tau", "every", "g"), [(5, 1, 1), (5, 2, 2), (4, 1, 3), (7, 3, 2)])
def test_hl_sgd_where_the_order_of_exchanges_and_their_direction_matter(
    tau: int, every: int, g: int, mode: str
) -> None:
    """Graphs whose matrices do not commute, one of them one-sided; few report, so that no mean hides it."""
    names = (["star", "path", "one-peer-exponential"], ["one-peer-exponential"], ["ring"])
    sizes = [5, 5, 2]
    heard = [[h for name in turns for h in oracle.neighbours(name, n)] for turns, n in zip(names, sizes, strict=True)]
    drawn = {
        "sizes": sizes, "members": [[3, 1, 4, 0, 9], [2, 6, 5, 10, 8], [7, 11]], "shards": [1] * 12,
        "mixing": [[oracle.metropolis_hastings(h) for h in turns] for turns in heard],
    }  # fmt: skip
    graphs = [{"name": "sequence", "of": turns} for turns in names]
    world = Instance(drawn | {"spec": {"members": drawn["members"], "graphs": graphs}})
    sampled = Hybrid(None, sample=0.3).reporters  # type: ignore[arg-type]
    expected = oracle.hl_sgd(
        *world.quadratics(), 2, tau, 0.15, every, g, lambda k, r: sampled(0, k, r, sizes[k])
    )[-1]  # fmt: skip
    options = {"local_steps": tau, "client_lr": 0.15, "gossip_every": every, "gossip_rounds": g, "p": 0.3}
    close(world.final({"name": "hl-sgd", **options}, 2, mode), expected)


@settings(max_examples=12, deadline=None)
@given(worlds(6, 1), st.integers(1, 6), st.sampled_from(["wave", "reference"]))
def test_gossip_pga(drawn: Any, tau: int, mode: str) -> None:
    world = Instance(drawn)
    inside = [world.matrices[i] for i in world.members[0]], [world.linear[i] for i in world.members[0]]
    expected = oracle.gossip_pga(*inside, world.mixing[0], np.ones(3), 3 * tau, tau, 0.15)[-1]
    close(world.final({"name": "gossip-pga", "local_steps": tau, "client_lr": 0.15}, 3, mode), expected)


@settings(max_examples=15, deadline=None)
@given(worlds(6, 1), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.sampled_from(["wave", "reference"]))
def test_gossip_sgd(drawn: Any, phases: int, every: int, g: int, mode: str) -> None:
    """Every device's model, and their mean; a job need not have whole turns of the graphs."""
    world = Instance(drawn)
    inside = [world.matrices[i] for i in world.members[0]], [world.linear[i] for i in world.members[0]]
    tau = phases * every
    devices = oracle.gossip_sgd(*inside, world.mixing[0], np.ones(3), 3 * tau, 0.15, every, g)
    spec = {
        "name": "gossip-sgd", "local_steps": tau, "client_lr": 0.15, "gossip_every": every, "gossip_rounds": g,
    }  # fmt: skip
    engine, _ = play(spec, world.task, world.times, 3, mode=mode, clusters=world.spec)
    close(engine.server.state["model"], np.mean(devices, axis=0))
    close(own_models(engine)[world.members[0]], devices)


def own_models(engine: Engine) -> np.ndarray:
    """Each device's own model, by client."""
    assert engine.solver.memory is not None
    everyone = torch.arange(engine.solver.problem.samples.clients)
    return (engine.server.state["origin"] + engine.solver.memory.read(("moved",), everyone)["moved"]).numpy()


@settings(max_examples=12, deadline=None)
@given(worlds(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["wave", "reference"]))
def test_hierarchical_local_sgd(drawn: Any, inner: int, outer: int, mode: str) -> None:
    world = Instance(drawn)
    quadratics = world.matrices, world.linear, world.members
    expected = oracle.hierarchical(*quadratics, np.ones(3), 3, inner, outer, 0.15)
    spec = {"name": "hierarchical-local-sgd", "local_steps": inner * outer, "gossip_every": inner, "client_lr": 0.15}
    close(world.final(spec, 3, mode), expected)


@settings(max_examples=15, deadline=None)
@given(
    worlds(),
    st.integers(1, 4),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2)),
    st.sampled_from([1.0, 0.5, 0.3]),
    st.sampled_from([("constant", lambda k: 1.0), ("polynomial", lambda k: (k + 1) ** -0.5)]),
    st.sampled_from(["wave", "reference"]),
)
def test_async_hl_sgd(
    drawn: Any, buffer: int, steps: tuple[int, int, int], p: float, stale: tuple[str, Any], mode: str
) -> None:
    """Against an event loop by hand: commits of the same jobs, as stale, and the same model."""
    world, (tau, every, g), p = Instance(drawn), steps, enough(p, drawn["sizes"])
    every, buffer = min(every, tau), min(buffer, len(world.sizes))
    sampled = Hybrid(None, sample=p).reporters  # type: ignore[arg-type]
    seconds = [
        d + tau * c + u for d, c, u in zip(world.times.down, world.times.step, world.times.up, strict=True)
    ]  # fmt: skip
    expected, jobs, ages = oracle.async_hl_sgd(
        *world.quadratics(), 8, tau, 0.15, seconds, buffer, lambda k, job: sampled(0, k, job, world.sizes[k]), every,
        g, 0.6, stale[1],
    )  # fmt: skip
    spec = {
        "name": "async-hl-sgd", "buffer_size": buffer, "local_steps": tau, "client_lr": 0.15, "p": p,
        "gossip_every": every, "gossip_rounds": g, "server_lr": 0.6, "staleness": stale[0],
    }  # fmt: skip
    engine, done = play(spec, world.task, world.times, 8, mode=mode, clusters=world.spec)
    assert [list(commit.step.commit.jobs) for commit in done] == jobs
    assert [commit.staleness for commit in done] == ages
    close(engine.server.state["model"], expected)


def test_a_buffer_of_one_counts_a_cluster_by_its_devices() -> None:
    """Two clusters of 1 and 3: the first commit is n_k K / N of what the faster one has moved."""
    matrices, linear = random_quadratic(4, 3, seed=11)
    for fast, share in ((0, 1 * 2 / 4), (1, 3 * 2 / 4)):
        steps = [0.1, 1.0] if fast == 0 else [1.0, 0.1]
        spec = {"name": "async-hl-sgd", "local_steps": 1, "client_lr": 0.1}
        world = Times([0.1, 0.1], steps, [0.1, 0.1])
        made = final(spec, exact(4), world, 1, clusters={"sizes": [1, 3], "graph": "complete"}).numpy()
        devices = [0] if fast == 0 else [1, 2, 3]
        gradient = np.mean([matrices[i] @ np.ones(3) - linear[i] for i in devices], axis=0)
        close(made, np.ones(3) - share * 0.1 * gradient)


# ---- laws between methods ------------------------------------------------------------------------
CLUSTERED = {"sizes": [1, 5, 2, 4]}
FOUR, TWELVE = times(4), times(12)


def hybrid_model(name: str, task: Any, commits: int = 6, clusters: Any = None, **options: Any) -> np.ndarray:
    return final({"name": name, **options}, task, FOUR, commits, clusters=clusters or CLUSTERED).numpy()


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("options", [{}, {"client_options": {"momentum": 0.9, "clip": 1.0}}])
def test_without_gossip_and_sampling_it_is_local_sgd(weights: str, options: dict[str, Any]) -> None:
    """W = I, p = 1 (section 4), with the same noise. "size" weighs clusters; inside, every device counts alike."""
    shared = {"local_steps": 5, "client_lr": 0.1, "server_lr": 0.8, "weights": weights, **options}
    task = quadratic_world(12)
    samples = np.repeat([2, 5, 3, 6], CLUSTERED["sizes"])
    task = replace(task, shards=[shard[:many] for shard, many in zip(task.shards, samples, strict=True)])
    local = final({"name": "local-sgd", "n": None, **shared}, task, TWELVE, 6).numpy()
    close(hybrid_model("hl-sgd", task, gossip_rounds=0, **shared), local, 1e-12)
    assert np.abs(local - hybrid_model("hl-sgd", task, **shared)).max() > 1e-4


def test_without_gossip_and_with_one_step_it_is_distributed_sgd() -> None:
    task = quadratic_world(12)
    distributed = final({"name": "minibatch-sgd", "server_lr": 0.1 * 0.7}, task, TWELVE, 12).numpy()
    shared = {"local_steps": 1, "client_lr": 0.1, "server_lr": 0.7}
    close(hybrid_model("hl-sgd", task, 12, gossip_rounds=0, **shared), distributed, 1e-12)
    # What a cluster exchanges after the only step of a round does not change its mean.
    close(hybrid_model("hl-sgd", task, 12, **shared), distributed, 1e-12)


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_a_complete_cluster_is_one_client_with_the_mean_objective(p: float) -> None:
    matrices, linear = random_quadratic(12, 3, seed=11)
    ends = np.cumsum([0, *CLUSTERED["sizes"]])
    inside = [range(a, b) for a, b in itertools.pairwise(ends)]
    means = [[np.mean([q[i] for i in devices], axis=0) for devices in inside] for q in (matrices, linear)]
    merged = quadratic(*means, np.ones(3))
    shared = {"local_steps": 5, "client_lr": 0.1}
    parts = [len(devices) / 12 for devices in inside]
    local = final({"name": "local-sgd", "n": None, "weights": parts, **shared}, merged, FOUR, 8).numpy()
    complete = CLUSTERED | {"graph": "complete"}
    close(hybrid_model("hl-sgd", exact(12), 8, complete, p=max(p, 0.5), **shared), local, 1e-12)


def test_an_edge_server_is_a_complete_graph_and_a_long_chain_of_exchanges_nearly_one() -> None:
    task, shared = quadratic_world(12), {"local_steps": 6, "gossip_every": 2, "client_lr": 0.1}
    edge = hybrid_model("hierarchical-local-sgd", task, **shared)
    close(edge, hybrid_model("hl-sgd", task, clusters=CLUSTERED | {"graph": "complete"}, **shared), 1e-12)
    close(edge, hybrid_model("hl-sgd", task, gossip_rounds=120, **shared), 1e-10)
    assert np.abs(edge - hybrid_model("hl-sgd", task, **shared)).max() > 1e-4


def test_gossip_pga_is_hl_sgd_with_one_cluster() -> None:
    task, one = quadratic_world(12), times(1)
    for options in ({}, {"gossip_every": 2, "gossip_rounds": 3}):
        shared = {"local_steps": 5, "client_lr": 0.1, **options}
        models = [final({"name": n, **shared}, task, one, 6, clusters=1) for n in ("gossip-pga", "hl-sgd")]
        assert torch.equal(*models)


def test_edge_servers_that_average_only_at_the_end_make_local_sgd() -> None:
    task, shared = quadratic_world(12), {"local_steps": 4, "client_lr": 0.1}
    local = final({"name": "local-sgd", "n": None, **shared}, task, TWELVE, 6).numpy()
    close(hybrid_model("hierarchical-local-sgd", task, gossip_every=4, **shared), local, 1e-12)


def test_a_policy_of_clusters_around_local_sgd_is_hl_sgd() -> None:
    shared = {"client_lr": 0.1, "server_lr": 0.8}
    when = {"policy": "hybrid", "between": {"policy": "rounds", "steps": 5}, "every": 2, "rounds": 2, "sample": 0.5}
    composed = hybrid_model("local-sgd", quadratic_world(12), when=when, experimental=True, **shared)
    options = {"local_steps": 5, "gossip_every": 2, "gossip_rounds": 2, "p": 0.5}
    close(composed, hybrid_model("hl-sgd", quadratic_world(12), **options, **shared), 0.0)


def test_one_cluster_that_waits_for_itself_is_hl_sgd() -> None:
    """A buffer of one over one cluster is never stale."""
    shared = {"local_steps": 5, "client_lr": 0.1, "p": 0.5, "server_lr": 0.7}
    task, one = quadratic_world(12), times(1)
    models = [final({"name": n, **shared}, task, one, 6, clusters=1) for n in ("async-hl-sgd", "hl-sgd")]
    close(*models, 1e-14)


# ---- gossip --------------------------------------------------------------------------------------
@st.composite
def doubly_stochastic(draw: Any) -> np.ndarray:
    """A mean of permutations (Birkhoff), most often not symmetric."""
    n = draw(st.integers(2, 6))
    orders = draw(st.lists(st.permutations(range(n)), min_size=1, max_size=4))
    parts = np.array(draw(st.lists(st.floats(0.05, 1.0), min_size=len(orders), max_size=len(orders))))
    return sum(part * np.eye(n)[list(order)] for part, order in zip(parts / parts.sum(), orders, strict=True))


STAY = {"schedule": "stages", "values": [1.0, 0.0], "at": [1]}  # one step, then gossip alone


def only_gossip(w: np.ndarray, pull: np.ndarray, commits: int) -> list[np.ndarray]:
    """Devices step once along their own pulls, then only mix; all of their models after each exchange."""
    made = build_method({"name": "gossip-sgd", "local_steps": 1, "client_lr": STAY})
    task = constant_pull(pull)
    spec = {"count": 1, "graph": "complete", "weights": w.tolist()}
    engine = engine_of(made, task, times(1), clusters=spec)
    clock = VirtualClock(made.when, times(1), generator(0, "policy"))
    models = []
    for _ in engine.commits(Horizon(clock, 1, commits, memory=True)):
        models.append(own_models(engine) - 1.0)
        close(engine.server.state["model"], 1.0 + models[-1].mean(axis=0), 1e-13)
    return models


@settings(max_examples=20, deadline=None)
@given(doubly_stochastic(), st.integers(0, 2**31))
def test_gossip_keeps_the_mean_and_contracts_by_rho(w: np.ndarray, seed: int) -> None:
    pull = np.random.default_rng(seed).standard_normal((len(w), 3))
    states = [pull, *only_gossip(w, pull, 4)]
    share = oracle.rho(w)
    for before, after in itertools.pairwise(states):
        close(after, w @ before, 1e-13)
        close(after.mean(axis=0), pull.mean(axis=0), 1e-13)
        off = [np.linalg.norm(x - x.mean(axis=0)) for x in (before, after)]
        assert off[1] <= share * off[0] + 1e-12


@pytest.mark.parametrize("name", ["ring", "path", "star", "grid", "exponential"])
def test_along_the_worst_direction_gossip_contracts_by_rho_exactly(name: str) -> None:
    w = oracle.metropolis_hastings(oracle.neighbours(name, 6)[0])
    values, vectors = np.linalg.eigh(w - 1 / 6)
    worst = int(np.abs(values).argmax())
    pull = vectors[:, [worst]]
    states = [pull, *only_gossip(w, pull, 5)]
    norms = [np.linalg.norm(x) for x in states]
    for before, after in itertools.pairwise(norms):
        assert after == pytest.approx(oracle.rho(w) * before, rel=1e-11)
    fleet = build_fleet("equal", 6, clusters={"count": 1, "graph": name})
    assert fleet.clusters.rho_max == pytest.approx(oracle.rho(w), rel=1e-12)


@pytest.mark.parametrize("graph", ["ring", "star", "unlinked"])
def test_gossip_sgd_does_not_depend_on_how_its_steps_are_cut(graph: str) -> None:
    task, models = exact(7), []
    for steps, commits in ((2, 6), (3, 4), (12, 1), (1, 12)):
        spec = {"name": "gossip-sgd", "local_steps": steps, "client_lr": 0.1}
        clusters = {"count": 1, "graph": graph} if graph != "unlinked" else None
        spec |= {"gossip_rounds": 0} if graph == "unlinked" else {}
        engine, _ = play(spec, task, times(1), commits, clusters=clusters)
        models.append(own_models(engine))
        close(engine.server.state["model"], models[-1].mean(axis=0), 1e-13)
        close(models[-1], models[0], 1e-12)
    assert np.abs(models[0] - models[0].mean(axis=0)).max() > 0.01


MATCHINGS = {"name": "sequence", "of": [{"name": "edges", "edges": [[0, 1], [2, 3]]},
                                        {"name": "edges", "edges": [[1, 2], [3, 0]]}]}  # fmt: skip


@modes
@pytest.mark.parametrize("graph", [MATCHINGS, {"name": "sequence", "of": ["star", "path", "one-peer-exponential"]}])
@pytest.mark.parametrize("g", [1, 2])
def test_gossip_sgd_with_changing_graphs_does_not_depend_on_the_cut(graph: Any, g: int, mode: str) -> None:
    """Two matchings in turn connect four devices, with one step a commit too: matrices go on from job to job."""
    models = []
    for steps, commits in ((12, 1), (1, 12), (3, 4)):
        spec = {"name": "gossip-sgd", "local_steps": steps, "client_lr": 0.1, "gossip_rounds": g}
        engine, _ = play(spec, exact(4), times(1), commits, mode=mode, clusters={"count": 1, "graph": graph})
        models.append(own_models(engine))
        close(models[-1], models[0], 1e-12)


def test_matrices_go_on_from_job_to_job_in_every_cluster_of_a_wave() -> None:
    """Jobs of other numbers beside it do not change a cluster's turn: after its only step, job j uses matrix j."""
    made = build_method({"name": "hl-sgd", "local_steps": 1, "client_lr": 0.1})
    graphs = [MATCHINGS, "ring", {"name": "sequence", "of": ["path", "star", "ring"]}]
    spec = {"sizes": [4, 4, 4], "graphs": graphs}
    engine = engine_of(made, exact(12), times(3), clusters=spec)
    jobs = [Begun(k, job, 0, 1) for k, job in [(0, 0), (0, 1), (1, 4), (2, 5), (2, 3), (0, 7)]]
    made_of = engine.solve(jobs).updates["delta"].numpy().reshape(len(jobs), 4, 3)
    matrices, linear = random_quadratic(12, 3, seed=11)
    clusters = build_fleet("equal", 12, clusters=spec).clusters.each
    for job, rows in zip(jobs, made_of, strict=True):
        devices = range(4 * job.client, 4 * job.client + 4)
        stepped = np.stack([0.1 * (matrices[i] @ np.ones(3) - linear[i]) for i in devices])
        mixing = clusters[job.client].mixing
        close(rows, mixing[job.job % len(mixing)] @ stepped)


DIVIDES = "models are exchanged after every 2 steps, and a commit looks after 3: the one must divide the other"
ONE_MEAN = "an edge server takes one mean and reports for all, so gossip_rounds = {} and p = {} have no meaning"


def said_of(**spec: Any) -> list[str]:
    made = build_method({"client_lr": 0.1, **spec})
    return made.when.problems(1)


@pytest.mark.parametrize("spec", [{"name": "gossip-sgd"}, {"name": "hierarchical-local-sgd"},
                                  {"name": "hl-sgd", "edge": True}])  # fmt: skip
def test_a_commit_that_looks_between_exchanges_is_refused(spec: dict[str, Any]) -> None:
    """Without a server, and with an edge server, steps left over at the end of a job would belong to no exchange."""
    assert said_of(**spec, local_steps=3, gossip_every=2) == [f"hybrid: {DIVIDES}"]
    assert said_of(**spec, local_steps=4, gossip_every=2) == []


def test_with_a_server_steps_may_be_left_over() -> None:
    assert said_of(name="hl-sgd", local_steps=3, gossip_every=2) == []
    assert said_of(name="async-hl-sgd", local_steps=3, gossip_every=2) == []


@pytest.mark.parametrize(("g", "p"), [(0, 1.0), (2, 1.0), (1, 0.5), (3, 0.25)])
def test_an_edge_server_takes_one_mean_and_reports_for_all(g: int, p: float) -> None:
    (said,) = said_of(name="hl-sgd", edge=True, gossip_rounds=g, p=p, local_steps=3)
    assert ONE_MEAN.format(g, f"{p:g}") in said
    assert said_of(name="hl-sgd", edge=True, local_steps=3) == []


# ---- where they end ------------------------------------------------------------------------------
RINGS = [[range(1), range(1, 6), range(6, 8), range(8, 12)], [oracle.neighbours("ring", n)[0] for n in (1, 5, 2, 4)]]


def hl_limit(lr: float, tau: int) -> np.ndarray:
    """Where rounds of HL-SGD with exact gradients at a constant rate end."""
    matrices, linear = random_quadratic(12, 3, seed=11)
    mixing = [[oracle.metropolis_hastings(heard)] for heard in RINGS[1]]
    return oracle.fixed_point(
        lambda x: oracle.hl_sgd(matrices, linear, RINGS[0], mixing, x, 1, tau, lr)[-1], 3
    )  # fmt: skip


def test_with_a_constant_rate_hl_sgd_ends_beside_the_optimum() -> None:
    """At the fixed point of its round, off by about the rate; with one step a round, at the optimum itself."""
    best, end = optimum(*random_quadratic(12, 3, seed=11)), hl_limit(0.1, 4)
    made = hybrid_model("hl-sgd", exact(12), 45, local_steps=4, client_lr=0.1)
    close(made, end, 1e-6)
    assert np.abs(made - best).max() > 0.01
    assert 5 < np.abs(end - best).max() / np.abs(hl_limit(0.01, 4) - best).max() < 20  # first order in the rate
    close(hybrid_model("hl-sgd", exact(12), 40, local_steps=1, client_lr=0.5), best, 1e-8)


def test_with_a_falling_rate_hl_sgd_ends_at_the_optimum() -> None:
    """Round r is drawn to the fixed point at its rate, which is off by about C lr_r. The rate falls slowly (by less
    than 1 / (2 r) a round, while a round at lr closes tau lr / 2 or more of the way), so the model is no further off
    than twice the fixed point at the last rate."""
    best, rounds = optimum(*random_quadratic(12, 3, seed=11)), 80
    rate = {"schedule": "inverse-sqrt", "value": 0.1}
    made = hybrid_model("hl-sgd", exact(12), rounds, local_steps=4, client_lr=rate)
    last = 0.1 / math.sqrt(rounds)
    gap = np.abs(hl_limit(last, 4) - best).max()
    assert np.abs(made - best).max() < 2 * gap < 0.03
    assert np.abs(hl_limit(0.1, 4) - best).max() > 5 * gap


def test_with_a_constant_rate_gossip_sgd_ends_beside_the_optimum() -> None:
    """Also its mean: devices that never agree weigh their own curvatures at other places."""
    matrices, linear = random_quadratic(7, 3, seed=11)
    w = oracle.metropolis_hastings(oracle.neighbours("ring", 7)[0])
    limit = oracle.gossip_limit(matrices, linear, w, 0.2)
    spec = {"name": "gossip-sgd", "local_steps": 16, "client_lr": 0.2}
    engine, _ = play(spec, exact(7), times(1), 10, clusters=1)
    close(own_models(engine), limit, 1e-10)
    best = optimum(matrices, linear)
    assert np.abs(engine.server.state["model"].numpy() - best).max() > 1e-3
    finer = oracle.gossip_limit(matrices, linear, w, 0.001).mean(axis=0)
    assert np.abs(finer - best).max() < 0.05 * np.abs(limit.mean(axis=0) - best).max()


# ---- the engine ----------------------------------------------------------------------------------
SEQUENCE = {"name": "sequence", "of": ["star", "one-peer-exponential", {"name": "erdos-renyi", "p": 0.7}]}
CHANGING = {"sizes": [1, 5, 2, 4], "graphs": ["ring", "one-peer-exponential", "path", SEQUENCE]}
UNDER_TEST: dict[str, dict[str, Any]] = {
    "async-hl-sgd": {"buffer_size": 2, "local_steps": 5, "gossip_every": 2, "p": 0.5, "server_lr": 0.7},
    "gossip-pga": {"local_steps": 5},
    "gossip-sgd": {"local_steps": 4, "gossip_every": 2},
    "hierarchical-local-sgd": {"local_steps": 4, "gossip_every": 2},
    "hl-sgd": {"local_steps": 7, "gossip_every": 2, "gossip_rounds": 2, "p": 0.5},
}
every_method = pytest.mark.parametrize("name", HYBRID)


def whole(name: str) -> tuple[Any, Any]:
    """Times and clusters: four of unequal sizes, or one where there is no server."""
    one = {"count": 1, "graph": {"name": "sequence", "of": ["ring", "one-peer-exponential"]}}
    return (times(1), one) if name == "gossip-sgd" else (FOUR, CHANGING)


@every_method
def test_how_waves_are_cut_does_not_matter(name: str) -> None:
    durations, clusters = whole(name)
    made, task = build_method({"name": name, **UNDER_TEST[name]}), quadratic_world(12)
    models = []
    for limit in (1, 3, 100):
        engine = engine_of(made, task, durations, clusters=clusters)
        engine.solver.limit = limit
        clock = VirtualClock(made.when, durations, generator(0, "policy"))
        list(engine.commits(Horizon(clock, 64, 4, memory=bool(made.what.local.remembers))))
        models.append(engine.server.state["model"].numpy())
        close(models[-1], models[0], 1e-12)


@every_method
def test_whole_shards_of_unequal_sizes_wave_equals_twin(name: str) -> None:
    """Rows of one cluster step with different numbers of samples, all of a shard at once."""
    task = quadratic_world(12)
    task = replace(task, batch_size=None, shards=[shard[: 1 + i % 6] for i, shard in enumerate(task.shards)])
    durations, clusters = whole(name)
    spec = {"name": name, **UNDER_TEST[name], "client_options": {"momentum": 0.5, "weight_decay": 0.01}}
    wave, twin = (final(spec, task, durations, 3, mode=mode, clusters=clusters) for mode in ("wave", "reference"))
    close(wave, twin, 1e-12)
    assert not np.allclose(wave.numpy(), 1.0)


def test_jobs_of_unequal_lengths_keep_their_places_in_a_wave() -> None:
    """Clusters of other sizes and steps beside it do not change a cluster's rows."""
    made = build_method({"name": "hl-sgd", **UNDER_TEST["hl-sgd"]})
    engine = engine_of(made, quadratic_world(12), FOUR, clusters=CHANGING)
    jobs = [Begun(k, job, 0, steps) for k, job, steps in [(1, 0, 7), (3, 2, 2), (0, 1, 7), (2, 0, 3), (1, 1, 2)]]
    together = engine.solve(jobs)
    first = 0
    for job in jobs:
        alone = engine.solve([job])
        rows = slice(first, first + engine.blocks.size(job))
        close(together.updates["delta"][rows], alone.updates["delta"], 1e-12)
        first += engine.blocks.size(job)
    assert first == len(together.updates["delta"]) == 5 + 4 + 1 + 2 + 5


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**31))
def test_mixing_in_float32_keeps_the_mean(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    mixing = [[oracle.metropolis_hastings(h) for h in oracle.neighbours("exponential", n)] for n in sizes]
    ends = np.cumsum([0, *sizes])
    members = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    blocks = Blocks(members, tuple(map(tuple, mixing)), 1, lambda cluster, job: [0])
    y = torch.from_numpy(rng.standard_normal((ends[-1], 50)).astype(np.float32))
    mixed = Mixer(blocks, [Begun(k, 0, 0, 1) for k in range(len(sizes))], y)(y, 0)
    assert mixed.dtype == torch.float32
    for (w,), a, b in zip(mixing, ends[:-1], ends[1:], strict=True):
        close(mixed[a:b].double().mean(dim=0), y[a:b].double().mean(dim=0), 1e-6)
        close(mixed[a:b], w @ y[a:b].double().numpy(), 1e-6)


def test_a_run_in_float32_keeps_the_mean() -> None:
    """Thirds are not exact in float32, and three of them sum to 1 + 3e-8; the diagonal makes up for it."""
    pull = np.random.default_rng(3).standard_normal((8, 40))
    made = build_method({"name": "gossip-sgd", "local_steps": 1, "client_lr": STAY})
    blocks = engine_of(made, constant_pull(pull), times(1), clusters=1).blocks
    engine = Engine(made, constant_pull(pull), 0, torch.device("cpu"), "float32", blocks=blocks)
    clock = VirtualClock(made.when, times(1), generator(0, "policy"))
    list(engine.commits(Horizon(clock, 64, 12, memory=True)))
    close(engine.server.state["model"], 1 + pull.mean(axis=0), 5e-7)
    w = oracle.metropolis_hastings(oracle.neighbours("ring", 8)[0])
    close(own_models(engine), 1 + np.linalg.matrix_power(w, 12) @ pull, 2e-6)


def mixer_of(w: np.ndarray, like: torch.Tensor) -> Mixer:
    blocks = Blocks((tuple(range(len(w))),), ((w,),), 1, lambda cluster, job: [0])
    return Mixer(blocks, [Begun(0, 0, 0, 1)], like)


@pytest.mark.parametrize(
    ("name", "n"),
    [("ring", 8), ("ring", 12), ("complete", 7), ("exponential", 12), ("torus", 9), ("one-peer-exponential", 8),
     ("path", 12), ("star", 12),
     ("grid", 12)],
)  # fmt: skip
def test_what_is_added_in_float32_sums_to_zero_exactly(name: str, n: int) -> None:
    w = oracle.metropolis_hastings(oracle.neighbours(name, n)[0])
    ((_, (made,)),) = mixer_of(w, torch.ones(n, 1)).groups
    assert made.dtype == torch.float32
    assert np.abs(made[0].double().numpy().sum(axis=0)).max() == 0
    close(made[0], w - np.eye(n), 6e-7)


def drift(name: str, n: int, exchanges: int = 50) -> np.ndarray:
    """How far the means of 1000 columns between 1 and 2 have moved, relatively."""
    start = torch.from_numpy(1 + np.random.default_rng(n).random((n, 1000)).astype(np.float32))
    mixer, y = mixer_of(oracle.metropolis_hastings(oracle.neighbours(name, n)[0]), start), start
    for phase in range(exchanges):
        y = mixer(y, phase)
    return (y.double().mean(dim=0) / start.double().mean(dim=0) - 1).numpy()


@pytest.mark.parametrize("n", [3, 5, 8, 12, 32])
def test_the_mean_of_a_ring_hardly_drifts_in_float32(n: int) -> None:
    """Thirds as they come would move all of them by 1e-6 in fifty exchanges, and one or another by 1.7e-6."""
    moved = drift("ring", n)
    assert abs(moved.mean()) < 3e-7
    assert np.abs(moved).max() < 9e-7


@pytest.mark.parametrize(("name", "n"), [("ring", 8), ("ring", 12), ("ring", 32), ("path", 12), ("star", 12)])
def test_means_do_not_drift_systematically_in_float32(name: str, n: int) -> None:
    assert abs(drift(name, n).mean()) < 1.5e-7


@modes
@pytest.mark.parametrize("name", ["hl-sgd", "gossip-sgd", "async-hl-sgd"])
def test_bad_numbers_name_the_client_and_its_cluster(name: str, mode: str) -> None:
    """Client 6 has a NaN; its neighbours take it on with the next exchange, but it was the first."""
    task = exact(12)
    x, y = task.data
    x = x.clone()
    x[6, -1] = math.nan
    task = replace(task, data=(x, y))
    durations, clusters = (times(1), 1) if name == "gossip-sgd" else (FOUR, CLUSTERED)
    said = "client 6 (cluster 0)" if name == "gossip-sgd" else "client 6 (cluster 2)"
    spec = {"name": name, "local_steps": 3, "client_lr": 0.1}
    with pytest.raises(BadNumbers, match=re.escape(f"{said}, version 0: the loss at local step 0 is not finite")):
        play(spec, task, durations, 20, mode=mode, clusters=clusters)


# ---- stopping and going on -----------------------------------------------------------------------
JITTERY = {"name": "custom", "step_seconds": {"law": "uniform", "low": 0.01, "high": 0.05}, "latency": 0.02,
           "jitter": {"law": "lognormal", "median": 1.0, "sigma": 0.5}}  # fmt: skip
RESUMED = ("async-hl-sgd", "gossip-sgd", "hl-sgd")


def experiment(name: str, **given: Any) -> Experiment:
    task = {"name": "quadratic", "clients": 12, "noise": 0.5, "samples": 5}
    _, clusters = whole(name)
    clusters = clusters | {"latency": {"law": "uniform", "low": 0.001, "high": 0.01}}
    method = {"name": name, **UNDER_TEST[name], "client_options": {"momentum": 0.5}}
    usual = {"method": method, "task": task, "fleet": JITTERY | {"clusters": clusters}, "device": "cpu", "seed": 4}
    return Experiment(**usual | {"until": {"commits": 10}, "evaluate": {"every_commits": 2}} | given)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_straight_run(name: str, tmp_path: Path) -> None:
    chosen = experiment(name)
    straight = run(chosen, tmp_path / "straight")
    with pytest.raises(Interrupted):
        run(chosen, tmp_path / "halted", InterruptAt(3))
    with pytest.raises(Interrupted):
        resume(tmp_path / "halted", None, InterruptAt(7))
    assert json.loads((tmp_path / "halted" / "result.json").read_text())["commits"] == 7
    resumed = resume(tmp_path / "halted")
    assert (tmp_path / "halted/trace.parquet").read_bytes() == (tmp_path / "straight/trace.parquet").read_bytes()
    assert same_bits(resumed.model, straight.model)
    assert resumed.metrics == straight.metrics
    assert figures(resumed) == figures(straight)


@pytest.mark.parametrize("name", HYBRID)
def test_a_replay_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    made = run(experiment(name, until={"commits": 5}), tmp_path / "first")
    again = replay(tmp_path / "first")
    assert same_bits(again.model, made.model)
    assert again.metrics == made.metrics
    assert figures(again) == figures(made)


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed between checkpoints: the memory of devices comes back with the rest."""
    chosen = experiment("gossip-sgd", until={"commits": 20}, checkpoint_seconds=1e-6)
    out = tmp_path / "killed"
    killed_process(7, chosen, out)
    straight = run(replace(chosen, checkpoint_seconds=60.0), tmp_path / "straight")
    resumed = resume(out)
    assert same_bits(resumed.model, straight.model)
    assert resumed.metrics == straight.metrics
    assert figures(resumed) == figures(straight)
