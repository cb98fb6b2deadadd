"""Device-to-device graphs and their mixing matrices.

Nodes are numbered 0 to n - 1. A builder gives a list: the graphs used in turn, one after each gossip. In a gossip
client i takes `sum_j W[i, j] x_j`, so an edge j -> i of a directed graph stands for the entry W[i, j].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import networkx as nx
import numpy as np

from offbeat.config import registry
from offbeat.config.options import fits, option_problems
from offbeat.errors import ConfigError, in_words
from offbeat.fleets.distributions import Array, shortened
from offbeat.fleets.steps import refuse
from offbeat.keys import key, unsigned

TRIES = 2000  # draws of a random graph before it is given up as not connected
ROUNDING = 1e-12  # a spectral norm below it is zero
OFF = 1e-9  # how far the sum of a row or a column may be from one
CLIENTS = 8  # so many clients are named in a sentence, the others counted
Builder: TypeAlias = Callable[..., list[nx.Graph]]


# ---- builders: (nodes, seed, options) -> the graphs used in turn ---------------------------------
def edges(nodes: int, seed: int = 0, *, edges: list[list[int]]) -> list[nx.Graph]:
    """These links, each a pair of node numbers."""
    refuse(shortened([
        f"entry {index} of edges is {pair!r:.60}; give a pair of different node numbers from 0 to {nodes - 1}"
        for index, pair in enumerate(edges)
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and pair[0] != pair[1])
        or not all(fits(node, int) and 0 <= node < nodes for node in pair)
    ]))  # fmt: skip
    return [nx.compose(nx.empty_graph(nodes), nx.from_edgelist(edges))]


def erdos_renyi(nodes: int, seed: int = 0, *, p: float) -> list[nx.Graph]:
    """Each pair is linked with probability p; drawn again until the graph is connected."""
    if not 0.0 < p <= 1.0:
        refuse([f"p = {p}; it is the probability of a link, so give a number above 0 and at most 1"])
    hint = f"few are connected below p = ln(n)/n = {math.log(nodes) / nodes:.3g}, so give a larger p"
    chance = max(p, 1e-15)  # NetworkX divides by log(1 - p)
    return connected(lambda k: nx.fast_gnp_random_graph(nodes, chance, k), seed, "erdos-renyi", f"p = {p}", hint)


def exponential(nodes: int, seed: int = 0) -> list[nx.Graph]:
    """Node i is linked to i +- 1, 2, 4, ... < n: the static graph of Ying et al. (2021), made symmetric."""
    return [nx.circulant_graph(nodes, [2**k for k in range((nodes - 1).bit_length())])]


def one_peer_exponential(nodes: int, seed: int = 0) -> list[nx.Graph]:
    """Directed graphs j -> j + 2^k mod n for k = 0, 1, ... while 2^k < n, used in turn (Ying et al. 2021)."""
    peers = [[(j, (j + 2**k) % nodes) for j in range(nodes)] for k in range((nodes - 1).bit_length())]
    return [nx.DiGraph(pairs) for pairs in peers] or [nx.empty_graph(nodes, nx.DiGraph)]


def regular(nodes: int, seed: int = 0, *, degree: int) -> list[nx.Graph]:
    """Random, with `degree` links at every node (a lone node has none); drawn again until the graph is connected."""
    least = 1 if nodes == 2 else 2
    if nodes > 1 and not least <= degree < nodes:
        refuse([f"degree = {degree}; to connect {nodes} nodes, give each of them {least} to {nodes - 1} links"])
    if nodes > 1 and nodes * degree % 2:
        refuse([f"degree = {degree} and {nodes} nodes; one of the two numbers must be even, so give another degree"])
    d = min(degree, nodes - 1 - degree) if nodes > 1 else 0
    turn = nx.Graph if d == degree else nx.complement  # NetworkX may take minutes to draw a dense graph
    return connected(lambda k: turn(nx.random_regular_graph(d, nodes, k)), seed, "regular", f"{degree = }", "raise it")


def ring(nodes: int) -> nx.Graph:
    """A closed line; two nodes share one link."""
    return nx.cycle_graph(nodes) if nodes > 1 else nx.empty_graph(nodes)


def sequence(nodes: int, seed: int = 0, *, of: list[Any]) -> list[nx.Graph]:
    """The graphs of these specs, one after the other; each spec draws with a seed of its own."""
    problems: list[str] = [] if of else ["of is empty; give at least one graph"]
    result = []
    for index, spec in enumerate(of):
        try:
            result += graphs_of(spec, nodes, unsigned(key(seed, "sequence", index)))
        except ConfigError as error:
            problems += [f"entry {index}: {sentence}" for sentence in error.problems]
    refuse(problems)
    return result


def lattice(said: str, line: Callable[[int], nx.Graph]) -> Builder:
    """The builder of rows and columns that are such lines, as nearly square as can be where no rows are given."""

    def made(nodes: int, seed: int = 0, *, rows: int | None = None) -> list[nx.Graph]:
        fitting = [row for row in range(1, nodes + 1) if nodes % row == 0]
        if rows is None or nodes == 1:
            rows = max(row for row in fitting if row * row <= nodes)
        if rows not in fitting:
            refuse([f"rows = {rows} does not divide {nodes} nodes; give one of {', '.join(map(str, fitting))}"])
        graph = nx.cartesian_product(line(rows), line(nodes // rows))
        return [nx.convert_node_labels_to_integers(graph, ordering="sorted")]  # row by row

    made.__doc__ = said
    return made


def connected(draw: Callable[[int], nx.Graph], seed: int, purpose: str, given: str, hint: str) -> list[nx.Graph]:
    """The first connected graph of the draws keyed by (seed, purpose, try)."""
    for attempt in range(TRIES):
        graph = draw(unsigned(key(seed, purpose, attempt)))
        if nx.is_connected(graph):
            return [graph]
    raise ConfigError([f"{given} gave no connected graph of {len(graph)} nodes in {TRIES:,} draws; {hint}"])


def fixed(said: str, make: Callable[[int], nx.Graph]) -> Builder:
    """A builder of a graph that has no options and no chance in it."""

    def build(nodes: int, seed: int = 0) -> list[nx.Graph]:
        return [make(nodes)]

    build.__doc__ = said
    return build


GRAPHS: dict[str, Builder] = {
    "complete": fixed("Everyone is linked to everyone: one gossip is the mean.", nx.complete_graph),
    "edges": edges,
    "erdos-renyi": erdos_renyi,
    "exponential": exponential,
    "grid": lattice("Rows and columns, of as nearly equal number as can be unless `rows` says.", nx.path_graph),
    "one-peer-exponential": one_peer_exponential,
    "path": fixed("A line.", nx.path_graph),
    "regular": regular,
    "ring": fixed("A circle.", ring),
    "sequence": sequence,
    "star": fixed("Node 0 is linked to all others.", lambda nodes: nx.star_graph(nodes - 1)),
    "torus": lattice("A grid whose rows and columns are circles.", ring),
    "unlinked": fixed("No links: for edge servers, or no gossip.", nx.empty_graph),
}


def graphs_of(spec: Any, nodes: int, seed: int = 0) -> list[nx.Graph]:
    """The graphs of a spec: a name, or a table with a name and options. Raises ConfigError with what is wrong.

    >>> sorted(graphs_of({"name": "grid", "rows": 2}, 4)[0].edges)
    [(0, 1), (0, 2), (1, 3), (2, 3)]
    """
    table = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError([f'graph = {spec!r:.60}; give a name, or a table such as {{name = "grid", rows = 2}}'])
    where = f"graph '{name}'"
    problems = option_problems(where, registry.find("graph", name), table, ("nodes", "seed"))
    if not fits(nodes, int) or nodes < 1:
        problems.append(f"{where}: nodes = {nodes!r}; give a whole number >= 1")
    refuse(problems)
    try:
        made = registry.make("graph", name, nodes, seed, **table)
    except ConfigError as error:
        raise ConfigError([f"{where}: {sentence.removeprefix(f'{where} ')}" for sentence in error.problems]) from None
    each = [made] if isinstance(made, nx.Graph) else list(made) if isinstance(made, list | tuple) else []
    if not each or not all(isinstance(graph, nx.Graph) and set(graph) == set(range(nodes)) for graph in each):
        given = ", ".join(map(str, each)) or in_words(made)
        refuse([f"{where} gives {given}; it must give networkx graphs of the nodes 0 to {nodes - 1}, one or more"])
    return each


# ---- weights: graph -> mixing matrix -------------------------------------------------------------
def links(graph: nx.Graph) -> Array:
    """1.0 at [i, j] where a link carries j's model to i, else 0.0."""
    return np.asarray(nx.to_numpy_array(graph, nodelist=range(len(graph)), weight=None).T * (1.0 - np.eye(len(graph))))


def metropolis(graph: nx.Graph) -> Array:
    """W[i, j] = 1 / (1 + max(deg i, deg j)), the in-degree where links are directed; W[i, i] is the rest to one."""
    linked = links(graph)
    own = 1.0 / (1.0 + linked.sum(axis=1))
    matrix: Array = linked * np.minimum.outer(own, own)
    return matrix + np.diag(own + (linked * own[:, None] - matrix).sum(axis=1))  # 1 - the others, with no cancellation


def max_degree(graph: nx.Graph) -> Array:
    """W[i, j] = 1 / (1 + the largest degree), the in-degree where links are directed; W[i, i] is the rest to one."""
    linked = links(graph)
    degrees = linked.sum(axis=1)
    most = 1.0 + degrees.max()
    return np.asarray((linked + np.diag(most - degrees)) / most)


WEIGHTS: dict[str, Callable[[nx.Graph], Array]] = {"max-degree": max_degree, "metropolis": metropolis}


def rho(matrix: Array) -> float:
    """||W - 11'/n||_2: a gossip leaves at most this share of the distance to the mean."""
    return rho_of([matrix])


def rho_of(matrices: Sequence[Array]) -> float:
    """||W_T ... W_1 - 11'/n||_2 ** (1 / T), the share per gossip, for doubly stochastic matrices used in turn."""
    if len(matrices) == 1 and np.array_equal(matrices[0], matrices[0].T):
        largest = float(np.abs(np.linalg.eigvalsh(matrices[0] - 1.0 / len(matrices[0]))).max())
        return 0.0 if largest < ROUNDING else min(1.0, largest)
    product, log = np.eye(len(matrices[0])), 0.0
    for matrix in matrices:
        product = (matrix - 1.0 / len(matrix)) @ product  # scaled as it shrinks: a long product is not lost in rounding
        size = float(np.linalg.norm(product, 2))
        if size < ROUNDING:
            return 0.0
        product, log = product / size, log + math.log(size)
    return min(1.0, math.exp(log / len(matrices)))  # doubly stochastic: rounding alone goes beyond


def gap(matrix: Array) -> float:
    """The spectral gap, 1 - rho."""
    return 1.0 - rho(matrix)


# ---- checks: what is wrong, in sentences that name clients ---------------------------------------
def weight_problems(where: str, matrix: Any, members: Sequence[int], graph: nx.Graph | None) -> list[str]:
    """Why a matrix is not doubly stochastic, or does not fit the graph; node k is client members[k]."""
    try:
        weights = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        return [f"{where}: the weights are no table of numbers; give rows of equal length"]
    size = len(members)
    if weights.shape != (size, size):
        return [f"{where}: weights of shape {weights.shape} for {size} clients; give each client a row and a column"]

    def entries(wrong: Any, what: str) -> list[str]:
        given = [f"row of client {members[i]} the weight of client {members[j]} is" for i, j in np.argwhere(wrong)]
        return shortened([f"{where}: in the {at} {w:g}{what}" for at, w in zip(given, weights[wrong], strict=True)])

    problems = entries(~(np.isfinite(weights) & (weights >= 0.0)), "; give a finite number >= 0")
    if not np.isfinite(weights).all():
        return problems
    for line, sums in (("row", weights.sum(axis=1)), ("column", weights.sum(axis=0))):
        pairs = [(client, total) for client, total in zip(members, sums, strict=True) if abs(total - 1.0) > OFF]
        off = [f"{client} sums to {total:.12g}, off by {total - 1.0:+.3g}" for client, total in pairs]
        problems += shortened([f"{where}: the {line} of client {text}; make its weights sum to one" for text in off])
    if graph is not None:
        loose = (weights > 0.0) & (links(graph) + np.eye(size) == 0.0)
        problems += entries(loose, ", but no link carries its model; set it to 0 or add the link")
    return problems


def link_problems(where: str, graphs: Sequence[nx.Graph], members: Sequence[int]) -> list[str]:
    """Who is cut off when all the graphs used in turn are laid over each other; node k is client members[k]."""
    directed = any(graph.is_directed() for graph in graphs)
    union = nx.compose_all([graph.to_directed() if directed else graph for graph in graphs])
    lone = sorted(nx.isolates(union)) if len(union) > 1 else []
    problems = (
        [f"{where}: no link in any graph for {named(lone, members)}; link every client to another"] if lone else []
    )
    union.remove_nodes_from(lone)
    split = nx.strongly_connected_components if directed else nx.connected_components
    parts = sorted((sorted(part) for part in split(union)), key=lambda part: (len(part), part))
    if len(parts) > 1:
        parted = f"the linked clients fall into {len(parts)} parts, the smallest of them {named(parts[0], members)}"
        problems.append(f"{where}: {parted}; add links between the parts{', both ways' if directed else ''}")
    return problems


def named(nodes: list[int], members: Sequence[int]) -> str:
    """Clients in words, the first few of them by number."""
    listed = ", ".join(str(members[node]) for node in nodes[:CLIENTS])
    more = f" and {len(nodes) - CLIENTS} more" if len(nodes) > CLIENTS else ""
    return f"client{'s' if len(nodes) > 1 else ''} {listed}{more}"
