"""Clusters of a fleet: which devices belong together, their device-to-device graphs, mixing matrices and links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import networkx as nx
import numpy as np

from offbeat.config.options import fits, option_problems
from offbeat.config.room import too_large
from offbeat.errors import ConfigError, in_words, unknown
from offbeat.fleets.distributions import NAMED, Array, Constant, Law, LawSpec, number_problems, numeric, read
from offbeat.fleets.graphs import WEIGHTS, graphs_of, link_problems, links, rho_of, weight_problems
from offbeat.keys import key, uniform, unsigned

TABLES = 4  # of [n, n] numbers for a cluster of n: links, weights, latencies, bandwidths
LINK = 300  # bytes of a link in a graph of NetworkX
MBIT = 1e6 / 8  # bytes per second in one Mbit/s
ClusterSpec: TypeAlias = int | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Cluster:
    """n devices. Graphs and matrices are used in turn, one for each exchange of models; most often there is one.

    `W[i, j] > 0` only where a link brings j's model to i. Every pair has a link time of latency + bytes / bandwidth,
    used where the graph has the link; so has every device to the cluster's edge server, where there is one.
    """

    members: tuple[int, ...]  # clients
    graphs: tuple[nx.Graph, ...]
    mixing: tuple[Array, ...]  # [n, n] each
    latency: Array  # [n, n], s
    bandwidth: Array  # [n, n], bytes per second; infinity is allowed
    edge_latency: Array  # [n]
    edge_bandwidth: Array
    pace: float = 1.0  # a factor on its devices' seconds per step

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def rho(self) -> float:
        """The factor by which one exchange shrinks the distance to the cluster's mean, at worst."""
        return rho_of(self.mixing)

    @property
    def linked(self) -> bool:
        """Whether there is any link; a cluster of one needs none."""
        return self.size == 1 or any(graph.number_of_edges() for graph in self.graphs)

    def hears(self, turn: int) -> Array:
        """[n, n]: 1 where the link from j to i is there."""
        return links(self.graphs[turn % len(self.graphs)])

    def sends(self) -> list[int]:
        """Models that go over the cluster's links in one exchange, by graph."""
        return [int(self.hears(turn).sum()) for turn in range(len(self.graphs))]

    def problems(self, where: str) -> list[str]:
        problems = []
        if self.linked:
            problems += link_problems(where, self.graphs, self.members)
        for graph, matrix in zip(self.graphs, self.mixing, strict=True):
            problems += weight_problems(where, matrix, self.members, graph)
        for name, array in (("d2d latency", self.latency), ("edge latency", self.edge_latency)):
            if not ((array >= 0) & (array < math.inf)).all():
                problems.append(f"{where}: {name} has {array.min()} to {array.max()} s; times are finite and >= 0")
        for name, array in (("d2d bandwidth", self.bandwidth), ("edge bandwidth", self.edge_bandwidth)):
            if not (array > 0).all():
                problems.append(f"{where}: {name} has {array.min()} bytes/s; a link must carry more than 0")
        return problems


@dataclass(frozen=True, eq=False)
class Clusters:
    """All clusters of a fleet. With `shared_uplink` those of a cluster's devices that report share one link to the
    server, so that m reports take m times as long (HL-SGD's c_d2s, linear in the sampling ratio)."""

    each: tuple[Cluster, ...]
    shared_uplink: bool = False

    def __len__(self) -> int:
        return len(self.each)

    @property
    def rho_max(self) -> float:
        return max(cluster.rho for cluster in self.each)

    def problems(self, clients: int) -> list[str]:
        """Everything that is impossible about them in a fleet of so many clients."""
        problems = member_problems([cluster.members for cluster in self.each], clients)
        for number, cluster in enumerate(self.each):
            problems += cluster.problems(f"cluster {number}")
        return problems


def member_problems(members: Sequence[Sequence[int]], clients: int) -> list[str]:
    """Clients that are in no cluster, in two, or not in the fleet; clusters without any."""
    problems = [f"cluster {k} has no devices; leave it out" for k, devices in enumerate(members) if not len(devices)]
    counts = Counter(device for devices in members for device in devices)
    strange = sorted(device for device in counts if not 0 <= device < clients)
    twice = sorted(device for device, times in counts.items() if times > 1)
    missing = [client for client in range(clients) if client not in counts]
    if strange:
        problems.append(f"clusters name {listed(strange)}, but the fleet has clients 0 to {clients - 1}")
    if twice:
        where = [k for k, devices in enumerate(members) if twice[0] in devices]
        problems.append(
            f"clusters overlap: {listed(twice)} more than once (client {twice[0]} in {where}); keep one each"
        )
    if missing:
        problems.append(f"clusters miss {listed(missing)}; every client belongs to one")
    return problems


def listed(clients: Sequence[int]) -> str:
    named = ", ".join(map(str, clients[:NAMED]))
    return f"client {named}" + (f" and {len(clients) - NAMED} more" if len(clients) > NAMED else "")


# ---- from a config ------------------------------------------------------------------------------
def layout(
    count: int | None = None,
    sizes: list[int] | None = None,
    members: list[list[int]] | None = None,
    graph: str | Mapping[str, Any] = "ring",
    graphs: list[Any] | None = None,
    weights: str | list[Any] = "metropolis",
    latency: LawSpec = 0.0,
    mbit: LawSpec | None = None,
    pace: list[float] | None = None,
    shared_uplink: bool = False,
) -> None:
    """Who: a `count` of clusters as equal as can be, their `sizes`, or their `members`. A `graph` for all or `graphs`
    for each, by name or table. `weights`: by rule, or a matrix for all or for each. Links between devices: `latency`
    (s) and `mbit`, numbers or laws. `pace`: for each cluster a factor on its seconds per step."""


def clusters_of(spec: ClusterSpec, clients: int, seed: int) -> Clusters:
    """From a number of rings, or a table as `layout` describes it. Raises ConfigError for what cannot be read; what
    is read and impossible (links, weights, members) is told by `Clusters.problems`."""
    given: dict[str, Any] = {"count": spec} if fits(spec, int) else dict(spec) if isinstance(spec, Mapping) else {}
    if not given:
        raise ConfigError(
            [f"clusters = {in_words(spec)}; give a number of clusters, or a table with count, sizes or members"]
        )
    problems = option_problems("clusters", layout, given)
    given = {name: value for name, value in given.items() if not option_problems("", layout, {name: value})}
    members = members_of(given, clients, problems)
    laws: dict[str, Law | None] = {
        "latency": read(given.get("latency", 0.0), "clusters: latency", problems),
        "mbit": None,
    }
    if (mbit := given.get("mbit")) is not None:
        problems += number_problems("clusters: mbit", mbit, positive=True) if numeric(mbit) and mbit == 0 else []
        laws["mbit"] = read(mbit, "clusters: mbit", problems)
    specs = for_each("graphs", given.get("graphs"), len(members), given.get("graph", "ring"), problems)
    if "graph" in given and "graphs" in given:
        problems.append("clusters: graph is for all clusters, graphs for each; give one of them")
    paces = paces_of(given, len(members), problems)
    weights = given.get("weights", "metropolis")
    if isinstance(weights, str) and weights not in WEIGHTS:
        problems.append(unknown("weights of clusters", weights, WEIGHTS))
        weights = "metropolis"
    each = []
    for number, (devices, graph) in enumerate(zip(members, specs, strict=True)):
        if not devices:
            problems.append(f"cluster {number} has no devices; leave it out")
            continue
        if large := cluster_size(number, len(devices), graph):
            problems += large
            continue
        try:
            made = tuple(graphs_of(graph, len(devices), unsigned(key(seed, "graph", number))))
        except ConfigError as error:
            problems += [f"cluster {number}: {sentence}" for sentence in error.problems]
            continue
        mixing = mixing_of(weights, number, len(members), made, problems)
        each.append(linked_cluster(tuple(devices), made, mixing, laws, seed, paces[number]))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return Clusters(tuple(each), given.get("shared_uplink", False))


def cluster_size(number: int, devices: int, graph: Any) -> list[str]:
    """A cluster whose tables of pairs, or whose links, do not fit into memory."""
    name = graph.get("name") if isinstance(graph, Mapping) else graph
    pairs = 8.0 * TABLES * devices**2 + (LINK * devices**2 / 2 if name in ("complete", "erdos-renyi") else 0.0)
    return too_large(f"cluster {number}: {devices:,} devices in one cluster", pairs, "give more and smaller clusters")


def members_of(given: Mapping[str, Any], clients: int, problems: list[str]) -> list[list[int]]:
    """The clients of each cluster; consecutive ones where only their number or sizes are given."""
    ways = [name for name in ("count", "sizes", "members") if given.get(name) is not None]
    anyway = [list(range(clients))]  # so that a first problem does not hide the others
    if len(ways) != 1:
        if not problems:
            problems.append(f"clusters: {' and '.join(ways) or 'nothing'} given; say one of count, sizes, members")
        return anyway
    what = given[ways[0]]
    if ways[0] == "members":
        good = all(isinstance(each, list | tuple) and all(fits(device, int) for device in each) for each in what)
        if not good or not what:
            problems.append(f"clusters: members = {in_words(what)}; give a list of clients for each cluster")
        return [list(each) for each in what] if good and what else anyway
    if ways[0] == "sizes":
        if not what or not all(fits(size, int) and size >= 1 for size in what) or sum(what) != clients:
            problems.append(
                f"clusters: sizes = {in_words(list(what))}; give numbers of devices that sum to the {clients} clients"
            )
            return anyway
        ends = np.cumsum(what)
    else:
        if not 1 <= what <= clients:
            problems.append(f"clusters: count = {what}; it must be between 1 and the {clients} clients")
            return anyway
        ends = np.arange(1, what + 1) * clients // what
    return [list(range(begin, end)) for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def for_each(name: str, given: Any, clusters: int, one: Any, problems: list[str]) -> list[Any]:
    """What is given for each cluster, or the same for all."""
    if given is None:
        return [one] * clusters
    if len(given) != clusters:
        if problems:  # how many clusters there are is not known
            return [*given, *[one] * clusters][:clusters]
        problems.append(f"clusters: {len(given)} {name} for {clusters} clusters; give one for each")
        return [one] * clusters
    return list(given)


def paces_of(given: Mapping[str, Any], clusters: int, problems: list[str]) -> list[float]:
    paces = for_each("pace", given.get("pace"), clusters, 1.0, problems)
    for pace in paces:
        problems += number_problems("clusters: pace", pace, positive=True)
    return paces


def mixing_of(
    given: str | Sequence[Any], number: int, clusters: int, graphs: Iterable[nx.Graph], problems: list[str]
) -> tuple[Array, ...]:
    """The matrices of one cluster: by a rule from its graphs, or as given."""
    if isinstance(given, str):
        return tuple(WEIGHTS[given](graph) for graph in graphs)
    try:
        table = [np.asarray(matrix, dtype=np.float64) for matrix in given]
    except (TypeError, ValueError):
        table = []
    if table and all(row.ndim == 1 for row in table) and len({len(row) for row in table}) == 1:
        return tuple(np.stack(table) for _ in graphs)  # one matrix for all
    if len(table) != clusters or not all(matrix.ndim == 2 for matrix in table):
        problems.append(
            f"clusters: weights are neither a rule ({', '.join(WEIGHTS)}), a matrix, nor {clusters} matrices"
        )
        return ()
    return tuple(table[number] for _ in graphs)


def linked_cluster(
    members: tuple[int, ...],
    graphs: tuple[nx.Graph, ...],
    mixing: tuple[Array, ...],
    laws: Mapping[str, Law | None],
    seed: int,
    pace: float,
) -> Cluster:
    """A cluster whose link times are drawn, keyed by the pair of clients (a device alone: its link to the edge)."""
    devices = np.array(members, dtype=np.int64)
    many = len(devices)

    def drawn(name: str, scale: float) -> tuple[Array, Array]:
        law = laws[name] or Constant(math.inf)
        if isinstance(law, Constant):
            return np.broadcast_to(law.value * scale, (many, many)), np.broadcast_to(law.value * scale, (many,))
        pair = np.minimum.outer(devices, devices), np.maximum.outer(devices, devices)
        of_pairs: Array = law(uniform(key(seed, f"d2d {name}", *pair))) * scale
        of_edge: Array = law(uniform(key(seed, f"edge {name}", devices))) * scale
        return of_pairs, of_edge

    latency, edge_latency = drawn("latency", 1.0)
    bandwidth, edge_bandwidth = drawn("mbit", MBIT)
    return Cluster(members, graphs, mixing, latency, bandwidth, edge_latency, edge_bandwidth, pace)
