"""Graphs and mixing matrices: closed forms of the spectrum, laws that every graph keeps, and every refusal."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import ConfigError
from offbeat.fleets import graphs
from offbeat.fleets.graphs import GRAPHS, WEIGHTS, gap, graphs_of, link_problems, max_degree, metropolis, rho, rho_of
from offbeat.fleets.graphs import weight_problems as weight_problems_of
from offbeat.keys import key, unsigned

CLOSE = {"rel": 0.0, "abs": 1e-12}
OPTIONS: dict[str, dict[str, Any]] = {
    "edges": {"edges": []},
    "erdos-renyi": {"p": 0.6},
    "regular": {"degree": 2},
    "sequence": {"of": ["ring", {"name": "erdos-renyi", "p": 0.7}, "one-peer-exponential"]},
}
SPECS = {name: {"name": name, **OPTIONS.get(name, {})} for name in GRAPHS}


def one(spec: Any, nodes: int, seed: int = 0) -> nx.Graph:
    (graph,) = graphs_of(spec, nodes, seed)
    return graph


def pairs(graph: nx.Graph) -> set[frozenset[int]]:
    return {frozenset(edge) for edge in graph.edges}


def refused(spec: Any, nodes: Any = 5) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        graphs_of(spec, nodes, 0)
    return caught.value.problems


# ---- closed forms of rho -------------------------------------------------------------------------
@pytest.mark.parametrize("n", range(3, 41))
def test_ring(n: int) -> None:
    k = np.arange(1, n)
    assert rho(metropolis(one("ring", n))) == pytest.approx(
        np.abs(1 / 3 + 2 / 3 * np.cos(2 * np.pi * k / n)).max(), **CLOSE
    )


@pytest.mark.parametrize("n", range(3, 41))
def test_path(n: int) -> None:
    assert rho(metropolis(one("path", n))) == pytest.approx(1 / 3 + 2 / 3 * np.cos(np.pi / n), **CLOSE)


@pytest.mark.parametrize(("a", "b"), [(3, 3), (3, 4), (3, 7), (4, 4), (5, 8), (6, 6)])
def test_torus(a: int, b: int) -> None:
    cosines = np.cos(2 * np.pi * np.arange(a) / a)[:, None] + np.cos(2 * np.pi * np.arange(b) / b)
    spectrum = np.abs(1 / 5 + 2 / 5 * cosines).ravel()[1:]
    assert rho(metropolis(one({"name": "torus", "rows": a}, a * b))) == pytest.approx(spectrum.max(), **CLOSE)


@pytest.mark.parametrize(("a", "b"), [(3, 3), (3, 4), (4, 3), (5, 5), (4, 9)])
def test_grid(a: int, b: int) -> None:
    laplacian = (2 - 2 * np.cos(np.pi * np.arange(a) / a))[:, None] + (2 - 2 * np.cos(np.pi * np.arange(b) / b))
    spectrum = np.abs(1 - laplacian / 5).ravel()[1:]
    assert rho(max_degree(one({"name": "grid", "rows": a}, a * b))) == pytest.approx(spectrum.max(), **CLOSE)


@pytest.mark.parametrize("n", [3, 4, 9, 30])
@pytest.mark.parametrize("weights", WEIGHTS.values())
def test_star(n: int, weights: Any) -> None:
    assert rho(weights(one("star", n))) == pytest.approx(1 - 1 / n, **CLOSE)
    assert gap(weights(one("star", n))) == pytest.approx(1 / n, **CLOSE)
    assert one("star", n).degree[0] == n - 1


@pytest.mark.parametrize("n", [1, 2, 3, 7, 49, 300])
@pytest.mark.parametrize("weights", WEIGHTS.values())
def test_complete(n: int, weights: Any) -> None:
    matrix = weights(one("complete", n))
    np.testing.assert_allclose(matrix, np.full((n, n), 1 / n), rtol=0, atol=1e-15)
    assert rho(matrix) == 0.0
    assert gap(matrix) == 1.0


@pytest.mark.parametrize("n", [2, 3, 5, 6, 8, 13, 16, 33])
def test_exponential(n: int) -> None:
    first = np.zeros(n)
    for offset in (1, 2, 4, 8, 16, 32):
        if offset < n:
            first[[offset, -offset]] = 1.0
    first[0] = 1.0
    spectrum = np.abs(np.fft.fft(first / first.sum()))[1:]
    assert rho(metropolis(one("exponential", n))) == pytest.approx(spectrum.max(), **CLOSE)


def test_no_links_leave_everything_as_it_is() -> None:
    for weights in WEIGHTS.values():
        np.testing.assert_array_equal(weights(one("unlinked", 4)), np.eye(4))
    assert rho(np.eye(4)) == pytest.approx(1.0, **CLOSE)
    assert rho(np.eye(1)) == 0.0


# ---- the one-peer sequence and other products ----------------------------------------------------
@pytest.mark.parametrize("power", range(1, 7))
def test_one_peer_averages_exactly(power: int) -> None:
    n = 2**power
    matrices = [metropolis(graph) for graph in graphs_of("one-peer-exponential", n, 0)]
    assert len(matrices) == power
    product = np.linalg.multi_dot([*matrices[::-1], np.eye(n)])
    np.testing.assert_allclose(product, np.full((n, n), 1 / n), rtol=0, atol=1e-14)
    assert rho_of(matrices) == 0.0


def test_one_peer_sends_forward() -> None:
    sent = [sorted(graph.edges) for graph in graphs_of("one-peer-exponential", 3, 0)]
    assert sent == [[(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]]
    assert [len(graphs_of("one-peer-exponential", n, 0)) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 1, 2, 2, 3, 3, 4]
    expected = 0.5 * (np.eye(5) + np.roll(np.eye(5), 2, axis=0))  # node i takes the model of i - 2
    np.testing.assert_array_equal(metropolis(graphs_of("one-peer-exponential", 5, 0)[1]), expected)
    np.testing.assert_array_equal(max_degree(graphs_of("one-peer-exponential", 5, 0)[1]), expected)


def test_rho_of_a_period_is_that_of_the_product() -> None:
    a, b, c = (metropolis(one(spec, 6)) for spec in ("path", "star", {"name": "edges", "edges": [[0, 5], [1, 2]]}))
    direct = np.linalg.norm(c @ b @ a - 1 / 6, 2) ** (1 / 3)
    assert rho_of([a, b, c]) == pytest.approx(direct, **CLOSE)
    assert abs(rho_of([b, a, c]) - direct) > 1e-3  # the order counts
    assert rho_of([a]) == rho(a)
    turn, swap = np.roll(np.eye(6), 1, axis=0), np.eye(6)[[1, 0, 2, 4, 3, 5]]
    d = 0.6 * turn + 0.3 * swap + 0.1 * turn @ swap  # not symmetric: neither is the product its own mirror image
    assert rho_of([d, a, b]) == pytest.approx(np.linalg.norm(b @ a @ d - 1 / 6, 2) ** (1 / 3), **CLOSE)
    assert abs(np.linalg.norm(b @ a @ d - 1 / 6, 2) - np.linalg.norm(d @ a @ b - 1 / 6, 2)) > 1e-3


def test_rho_of_a_long_period_is_not_lost_in_rounding() -> None:
    ring = metropolis(one("ring", 5))
    assert rho(ring) ** 60 < 1e-15
    assert rho_of([ring] * 60) == pytest.approx(rho(ring), **CLOSE)


def test_two_halves_that_meet_by_turns() -> None:
    spec = {"name": "sequence", "of": [{"name": "edges", "edges": [[0, 1], [2, 3]]},
                                       {"name": "edges", "edges": [[0, 2], [1, 3]]}]}  # fmt: skip
    matrices = [metropolis(graph) for graph in graphs_of(spec, 4, 0)]
    assert [rho(matrix) for matrix in matrices] == pytest.approx([1.0, 1.0])
    assert rho_of(matrices) == 0.0


# ---- laws of every graph -------------------------------------------------------------------------
@pytest.mark.parametrize("name", GRAPHS)
@given(n=st.integers(3, 24), seed=st.integers(-5, 2**40))
@settings(max_examples=12, deadline=None)
def test_every_graph_mixes_doubly_stochastically(name: str, n: int, seed: int) -> None:
    for graph in graphs_of(SPECS[name], n, seed):
        assert set(graph) == set(range(n))
        assert nx.number_of_selfloops(graph) == 0
        for weights in WEIGHTS.values():
            matrix = weights(graph)
            assert matrix.min() >= 0.0
            np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-13)
            np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-13)
            assert weight_problems_of("here", matrix, range(n), graph) == []
            assert rho(matrix) <= 1.0 + 1e-12


@pytest.mark.parametrize("name", GRAPHS)
def test_one_node_has_no_links(name: str) -> None:
    spec = {"grid": {"rows": 3}, "torus": {"rows": 3}, "regular": {"degree": 4}}.get(name, {})
    for graph in graphs_of({**SPECS[name], **spec}, 1, 0):
        assert list(graph) == [0]
        assert not graph.edges
        assert link_problems("here", [graph], [7]) == []
        for weights in WEIGHTS.values():
            np.testing.assert_array_equal(weights(graph), [[1.0]])
            assert rho(weights(graph)) == 0.0


@pytest.mark.parametrize("name", sorted(set(GRAPHS) - {"edges", "unlinked", "regular"}))
@pytest.mark.parametrize("n", [2, 3, 12])
def test_graphs_are_connected(name: str, n: int) -> None:
    assert link_problems("here", graphs_of(SPECS[name], n, 3), range(n)) == []


@given(n=st.integers(3, 20), seed=st.integers(0, 10**6), p=st.floats(0.4, 1.0))
@settings(max_examples=25, deadline=None)
def test_rho_does_not_hear_names(n: int, seed: int, p: float) -> None:
    graph = one({"name": "erdos-renyi", "p": p}, n, seed)
    order = np.random.default_rng(seed).permutation(n)
    renamed = nx.relabel_nodes(graph, dict(enumerate(order.tolist())))
    for weights in WEIGHTS.values():
        assert rho(weights(renamed)) == pytest.approx(rho(weights(graph)), abs=1e-10)
        np.testing.assert_allclose(weights(renamed)[np.ix_(order, order)], weights(graph), rtol=0, atol=1e-15)


def test_weights_entry_by_entry() -> None:
    graph = one({"name": "erdos-renyi", "p": 0.4}, 9, 4)
    degree = dict(graph.degree)
    assert len(set(degree.values())) > 2
    slow = {name: np.zeros((9, 9)) for name in WEIGHTS}
    for i, j in [*graph.edges, *((j, i) for i, j in graph.edges)]:
        slow["metropolis"][i, j] = 1 / (1 + max(degree[i], degree[j]))
        slow["max-degree"][i, j] = 1 / (1 + max(degree.values()))
    for name, matrix in slow.items():
        np.testing.assert_allclose(WEIGHTS[name](graph), matrix + np.diag(1 - matrix.sum(axis=1)), rtol=0, atol=1e-15)


def test_directed_links_count_what_comes_in() -> None:
    graph = nx.DiGraph([(0, 1), (2, 1)])
    np.testing.assert_allclose(metropolis(graph), [[1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]], rtol=0, atol=1e-15)
    np.testing.assert_allclose(max_degree(graph), metropolis(graph), rtol=0, atol=1e-15)


def test_weights_and_loops_of_a_foreign_graph_do_not_count() -> None:
    graph = nx.Graph()
    graph.add_edge(1, 0, weight=5.0)
    graph.add_edge(0, 0)
    np.testing.assert_array_equal(metropolis(graph), np.full((2, 2), 0.5))


# ---- shapes --------------------------------------------------------------------------------------
def test_small_rings() -> None:
    assert pairs(one("ring", 2)) == {frozenset((0, 1))}
    assert pairs(one("ring", 3)) == pairs(one("complete", 3))


def test_a_grid_is_numbered_row_by_row() -> None:
    assert pairs(one({"name": "grid", "rows": 2}, 6)) == {
        frozenset(pair) for pair in [(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)]
    }
    assert pairs(one({"name": "grid", "rows": 1}, 11)) == pairs(one("path", 11))


@pytest.mark.parametrize(("n", "rows"), [(12, 3), (16, 4), (30, 5), (2, 1), (8, 2)])
def test_no_rows_given_is_nearly_square(n: int, rows: int) -> None:
    for name in ("grid", "torus"):
        assert pairs(one(name, n)) == pairs(one({"name": name, "rows": rows}, n))
    assert one("grid", n).number_of_edges() == 2 * n - rows - n // rows


def test_thin_tori() -> None:
    assert pairs(one("torus", 7)) == pairs(one("ring", 7))  # a prime is one row
    assert one({"name": "torus", "rows": 2}, 10).number_of_edges() == 5 + 2 * 5
    assert pairs(one({"name": "torus", "rows": 2}, 4)) == pairs(one("grid", 4))
    assert set(dict(one("torus", 12).degree).values()) == {4}


def test_given_edges_are_the_edges() -> None:
    graph = one({"name": "edges", "edges": [[3, 1], (0, 1), [1, 0]]}, 5)
    assert list(graph) == [0, 1, 2, 3, 4]
    assert pairs(graph) == {frozenset((1, 3)), frozenset((0, 1))}


def test_a_sequence_is_flat_and_draws_anew() -> None:
    drawn = {"name": "erdos-renyi", "p": 0.5}
    spec = {"name": "sequence", "of": ["ring", {"name": "sequence", "of": [drawn, "path"]}, drawn]}
    made = graphs_of(spec, 9, 1)
    assert len(made) == 4
    assert pairs(made[0]) == pairs(one("ring", 9))
    assert pairs(made[2]) == pairs(one("path", 9))
    assert pairs(made[1]) != pairs(made[3])
    assert [pairs(graph) for graph in graphs_of(spec, 9, 1)] == [pairs(graph) for graph in made]


# ---- random graphs -------------------------------------------------------------------------------
def test_erdos_renyi_is_drawn_by_its_seed_and_connected() -> None:
    spec = {"name": "erdos-renyi", "p": 0.15}
    made = [one(spec, 20, seed) for seed in range(25)]
    assert all(nx.is_connected(graph) for graph in made)
    assert [pairs(one(spec, 20, seed)) for seed in range(25)] == [pairs(graph) for graph in made]
    assert len({frozenset(pairs(graph)) for graph in made}) == 25
    first = [nx.fast_gnp_random_graph(20, 0.15, unsigned(key(seed, "erdos-renyi", 0))) for seed in range(25)]
    whole = [nx.is_connected(graph) for graph in first]
    assert 0 < sum(whole) < 25  # some stood at once, some were drawn again
    assert [pairs(a) == pairs(b) for a, b in zip(first, made, strict=True)] == whole


def test_erdos_renyi_has_its_density() -> None:
    counts = [one({"name": "erdos-renyi", "p": 0.4}, 30, seed).number_of_edges() for seed in range(40)]
    assert np.mean(counts) == pytest.approx(0.4 * 435, abs=4 * np.sqrt(435 * 0.24 / 40))


def test_erdos_renyi_with_p_one_is_complete() -> None:
    graph = one({"name": "erdos-renyi", "p": 1}, 11)
    assert pairs(graph) == pairs(one("complete", 11))
    assert rho(metropolis(graph)) == 0.0


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (9, 2), (10, 3), (9, 4), (12, 11), (40, 38), (30, 24)])
def test_regular(n: int, degree: int) -> None:
    spec = {"name": "regular", "degree": degree}
    graph = one(spec, n, 6)
    assert set(dict(graph.degree).values()) == {degree}
    assert nx.is_connected(graph)
    assert pairs(one(spec, n, 6)) == pairs(graph)
    if 2 < degree < n - 1:
        assert pairs(one(spec, n, 7)) != pairs(graph)


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "nodes", "sentence"),
    [
        ("rign", 5, "unknown graph 'rign': did you mean 'ring'? Known: complete, edges, erdos-renyi, "),
        (7, 5, 'graph = 7; give a name, or a table such as {name = "grid", rows = 2}'),
        ({"rows": 2}, 5, "graph = {'rows': 2}; give a name, or a table such as"),
        ({"name": 3}, 5, "graph = {'name': 3}; give a name, or a table such as"),
        ("ring", 0, "graph 'ring': nodes = 0; give a whole number >= 1"),
        ("ring", 2.0, "graph 'ring': nodes = 2.0; give a whole number >= 1"),
        ({"name": "ring", "p": 1}, 5, "graph 'ring' has no options, but 'p' was given; leave it out"),
        ({"name": "grid", "row": 1}, 5, "unknown option of graph 'grid' 'row': did you mean 'rows'? Known: rows"),
        ({"name": "grid", "rows": 1.5}, 5, "graph 'grid': rows = 1.5; it must be a whole number or none"),
        ({"name": "grid", "rows": 4}, 6, "graph 'grid': rows = 4 does not divide 6 nodes; give one of 1, 2, 3, 6"),
        ({"name": "torus", "rows": 0}, 6, "graph 'torus': rows = 0 does not divide 6 nodes; give one of 1, 2, 3, 6"),
        ("erdos-renyi", 5, "graph 'erdos-renyi': p is missing; it has no default"),
        ({"name": "erdos-renyi", "p": 0}, 5, "graph 'erdos-renyi': p = 0; it is the probability of a link, so give"),
        ({"name": "erdos-renyi", "p": 1.1}, 5, "graph 'erdos-renyi': p = 1.1; it is the probability of a link, so"),
        ({"name": "erdos-renyi", "p": 1e-300}, 5, "graph 'erdos-renyi': p = 1e-300 gave no connected graph of 5 nodes"),
        (
            {"name": "regular", "degree": 5},
            5,
            "graph 'regular': degree = 5; to connect 5 nodes, give each of them 2 to 4",
        ),
        (
            {"name": "regular", "degree": 1},
            4,
            "graph 'regular': degree = 1; to connect 4 nodes, give each of them 2 to 3",
        ),
        (
            {"name": "regular", "degree": 0},
            2,
            "graph 'regular': degree = 0; to connect 2 nodes, give each of them 1 to 1",
        ),
        (
            {"name": "regular", "degree": 3},
            5,
            "graph 'regular': degree = 3 and 5 nodes; one of the two numbers must be",
        ),
        ({"name": "edges", "edges": "ab"}, 5, "graph 'edges': edges = 'ab'; it must be a list"),
        ({"name": "sequence", "of": []}, 5, "graph 'sequence': of is empty; give at least one graph"),
        ({"name": "sequence", "of": ["ring", 3]}, 5, "graph 'sequence': entry 1: graph = 3; give a name, or"),
    ],
)
def test_bad_graphs_are_refused(spec: Any, nodes: Any, sentence: str) -> None:
    (problem,) = refused(spec, nodes)
    assert problem.startswith(sentence)


@pytest.mark.parametrize("pair", [[0, 5], [-1, 2], [3, 3], [1], [0, 1, 2], 7, "01", [0, 1.0], [0, True], [[0], [1]]])
def test_bad_pairs_are_refused(pair: Any) -> None:
    (problem,) = refused({"name": "edges", "edges": [[0, 1], pair]})
    said = f"entry 1 of edges is {pair!r}; give a pair of different node numbers from 0 to 4"
    assert problem == f"graph 'edges': {said}"


def test_many_problems_are_named_together() -> None:
    many = refused({"name": "edges", "edges": [[n, n] for n in range(5)]})
    assert len(many) == 4
    assert many[3] == "graph 'edges': ... and 2 more of the kind"
    both = refused({"name": "sequence", "of": ["rign", "ring", {"name": "grid", "rows": 3}]})
    assert both[0].startswith("graph 'sequence': entry 0: unknown graph 'rign'")
    assert both[1] == "graph 'sequence': entry 2: graph 'grid': rows = 3 does not divide 5 nodes; give one of 1, 5"


def test_a_hopeless_draw_names_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "TRIES", 20)
    assert refused({"name": "erdos-renyi", "p": 0.01}, 50) == (
        "graph 'erdos-renyi': p = 0.01 gave no connected graph of 50 nodes in 20 draws; "
        "few are connected below p = ln(n)/n = 0.0782, so give a larger p",
    )
    monkeypatch.setattr(graphs, "TRIES", 1)
    first = [nx.random_regular_graph(2, 40, unsigned(key(seed, "regular", 0))) for seed in range(20)]
    seeds = [seed for seed, graph in enumerate(first) if not nx.is_connected(graph)]
    with pytest.raises(ConfigError, match="degree = 2 gave no connected graph of 40 nodes in 1 draws; raise it"):
        graphs_of({"name": "regular", "degree": 2}, 40, seeds[0])


# ---- checks --------------------------------------------------------------------------------------
MEMBERS = [4, 8, 15]
THIRDS = np.full((3, 3), 1 / 3)


def weight_problems(matrix: Any, graph: nx.Graph | None = None) -> list[str]:
    return weight_problems_of("cluster 2", matrix, MEMBERS, graph)


@pytest.mark.parametrize("matrix", [np.eye(2), np.ones(3), np.ones((3, 4)), 1.0])
def test_weights_of_a_wrong_shape(matrix: Any) -> None:
    shape = np.shape(matrix)
    said = f"cluster 2: weights of shape {shape} for 3 clients; give each client a row and a column"
    assert weight_problems(matrix) == [said]


@pytest.mark.parametrize("matrix", [[[1.0], [0.0, 1.0], []], "metropolis", [["a"] * 3] * 3])
def test_weights_that_are_no_numbers(matrix: Any) -> None:
    assert weight_problems(matrix) == ["cluster 2: the weights are no table of numbers; give rows of equal length"]


@pytest.mark.parametrize(("value", "said"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (-0.25, "-0.25")])
def test_entries_that_are_no_weights(value: float, said: str) -> None:
    matrix = THIRDS.copy()
    matrix[1, 2] = value
    first, *others = weight_problems(matrix)
    at = "cluster 2: in the row of client 8 the weight of client 15"
    assert first == f"{at} is {said}; give a finite number >= 0"
    assert len(others) == (2 if np.isfinite(value) else 0)  # the sums of its row and column


def test_rows_and_columns_that_do_not_sum_to_one() -> None:
    matrix = THIRDS.copy()
    matrix[1, 2] += 0.25
    assert weight_problems(matrix) == [
        "cluster 2: the row of client 8 sums to 1.25, off by +0.25; make its weights sum to one",
        "cluster 2: the column of client 15 sums to 1.25, off by +0.25; make its weights sum to one",
    ]
    matrix = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])  # rows are fine
    assert weight_problems(matrix) == [
        "cluster 2: the column of client 4 sums to 1.5, off by +0.5; make its weights sum to one",
        "cluster 2: the column of client 15 sums to 0.5, off by -0.5; make its weights sum to one",
    ]
    assert [problem.split(",")[0] for problem in weight_problems(matrix.T)] == [
        "cluster 2: the row of client 4 sums to 1.5",
        "cluster 2: the row of client 15 sums to 0.5",
    ]


def test_sums_may_be_off_by_rounding() -> None:
    for off, problems in ((5e-10, 0), (2e-9, 2)):
        matrix = THIRDS.copy()
        matrix[0, 0] += off
        assert len(weight_problems(matrix)) == problems


def test_weights_need_links() -> None:
    path = nx.path_graph(3)
    assert weight_problems(metropolis(path), path) == []
    assert weight_problems(THIRDS) == []
    said = "is 0.333333, but no link carries its model; set it to 0 or add the link"
    assert weight_problems(THIRDS, path) == [
        f"cluster 2: in the row of client 4 the weight of client 15 {said}",
        f"cluster 2: in the row of client 15 the weight of client 4 {said}",
    ]
    around = nx.DiGraph([(0, 1), (1, 2), (2, 0)])
    assert weight_problems(metropolis(around), around) == []
    wrong_way = weight_problems(metropolis(around).T, around)
    assert wrong_way[0].startswith("cluster 2: in the row of client 4 the weight of client 8 is 0.5, but no link")
    assert len(wrong_way) == 3


def test_clients_without_links_are_named() -> None:
    graph = nx.Graph([(0, 1), (1, 2)])
    graph.add_nodes_from(range(5))
    before = graph.copy()
    said = "cluster 2: no link in any graph for clients 13, 14; link every client to another"
    assert link_problems("cluster 2", [graph], range(10, 15)) == [said]
    assert nx.utils.graphs_equal(graph, before)
    other = nx.Graph([(0, 3), (0, 4)])
    assert link_problems("cluster 2", [graph, other], range(10, 15)) == []  # one after the other reaches all
    (problem,) = link_problems("cluster 2", [nx.empty_graph(20)], range(100, 120))
    assert "for clients 100, 101, 102, 103, 104, 105, 106, 107 and 12 more; link" in problem


def test_parts_are_counted_and_the_smallest_named() -> None:
    graph = nx.disjoint_union_all([nx.cycle_graph(4), nx.path_graph(2), nx.path_graph(3)])
    said = "the linked clients fall into 3 parts, the smallest of them clients 24, 25; add links between the parts"
    assert link_problems("cluster 0", [graph], range(20, 29)) == [f"cluster 0: {said}"]
    graph.add_node(9)
    lone, parts = link_problems("cluster 0", [graph], range(20, 30))
    assert lone == "cluster 0: no link in any graph for client 29; link every client to another"
    assert parts == f"cluster 0: {said}"


def test_directed_links_must_lead_there_and_back() -> None:
    line, back = nx.DiGraph([(0, 1), (1, 2)]), nx.DiGraph([(2, 0)])
    assert link_problems("cluster 1", [line], [7, 6, 5]) == [
        "cluster 1: the linked clients fall into 3 parts, the smallest of them client 7; "
        "add links between the parts, both ways"
    ]
    back.add_node(1)
    assert link_problems("cluster 1", [line, back], [7, 6, 5]) == []
    assert link_problems("cluster 1", [line, nx.path_graph(3)], [7, 6, 5]) == []  # undirected links lead both ways
