"""Where the devices of clusters are drawn, and which clusters are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx

from offbeat.fleets.clusters import Cluster
from offbeat.fleets.fleet import Fleet


def together(cluster: Cluster) -> nx.Graph:
    """All links that a cluster ever uses."""
    graph = nx.compose_all([nx.Graph(graph) for graph in cluster.graphs])
    graph.add_nodes_from(range(cluster.size))
    return graph


def alike(each: Sequence[Cluster], fleet: Fleet) -> dict[Any, list[int]]:
    """Numbers of clusters by what can be seen of them: their links, weights and speeds."""
    kinds: dict[Any, list[int]] = {}
    for number, cluster in enumerate(each):
        graphs = tuple(tuple(sorted(tuple(sorted(edge)) for edge in graph.edges)) for graph in cluster.graphs)
        weights = tuple(matrix.round(6).tobytes() for matrix in cluster.mixing)
        speeds = tuple(fleet.step_seconds[list(cluster.members)].round(9))
        equal = len(set(speeds)) == 1
        kinds.setdefault((cluster.size, graphs, weights, speeds[:1] if equal else speeds), []).append(number)
    return kinds


def named(numbers: Sequence[int]) -> str:
    """
    >>> named([2]), named([0, 1, 2]), named([0, 3])
    ('cluster 2', '3 clusters alike (0 to 2)', '2 clusters alike (0, 3)')
    """
    if len(numbers) == 1:
        return f"cluster {numbers[0]}"
    row = numbers[-1] - numbers[0] + 1 == len(numbers)
    listed = f"{numbers[0]} to {numbers[-1]}" if row else ", ".join(map(str, numbers[:6]))
    return f"{len(numbers)} clusters alike ({listed}{'' if row or len(numbers) <= 6 else ', ...'})"


def layout(graph: nx.Graph) -> dict[int, Any]:
    """Rings round, trees and grids spread out; large ones by their spectrum, which is fast."""
    if graph.number_of_edges() == 0:
        return dict(nx.circular_layout(graph))
    if graph.number_of_nodes() <= 64:
        return dict(nx.kamada_kawai_layout(graph))
    return dict(nx.spectral_layout(graph) if nx.is_connected(graph) else nx.circular_layout(graph))
