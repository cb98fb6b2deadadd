"""Where a fleet's clusters meet a hybrid policy: blocks to the engine, a crowd to the account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offbeat.fleets.clusters import Cluster
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.timing import phases
from offbeat.method import ClusterPolicy, Method, Policy, conducts_clusters
from offbeat.numerics.mixing import Blocks
from offbeat.runs.account import Crowd


def each(fleet: Fleet) -> tuple[Cluster, ...]:
    return fleet.clusters.each if fleet.clusters is not None else ()


def problems(method: Method, fleet: Fleet) -> list[str]:
    """What a method with a hybrid policy asks of the fleet, and the policy of the rule."""
    policy, rule, local, name = method.when, method.what, method.what.local, method.name
    assert conducts_clusters(policy)
    if fleet.clusters is None:
        return [f"{name} needs a fleet with clusters; give it some, such as clusters = 4 in [fleet]"]
    reasons = []
    for number, cluster in enumerate(fleet.clusters.each):
        if policy.gossips and not cluster.linked:
            reasons.append(
                f"cluster {number}: none of its {cluster.size} devices has a link, so they cannot gossip; give it a "
                "graph, or gossip_rounds = 0"
            )
    if not policy.server and len(fleet.clusters) > 1:
        reasons.append(
            f"{name}: without a server the models of {len(fleet.clusters)} clusters never meet; give the fleet one "
            "cluster, with a connected graph of all devices"
        )
    if fleet.presence is not None or fleet.drop_out:
        reasons.append(
            f"{name}: a cluster steps with all of its devices, but clients of this fleet come and go or lose jobs; "
            "take a fleet whose clients stay"
        )
    if not policy.server and (rule.up or rule.down):
        reasons.append(f"{name}: without a server nothing travels through stages; leave out stages")
    alone = rule.keeps or rule.travels is not None or rule.prime is not None or local.full_gradient
    if alone or (local.remembers and policy.server):
        reasons.append(
            f"{name}: its rule looks at clients one by one, and a policy of clusters does not show them; run it with "
            "its own policy, or run hl-sgd"
        )
    return reasons


def sharing(fleet: Fleet, policy: Policy) -> Fleet:
    """The fleet as its links to the server are when those who report together share them."""
    if fleet.clusters is None or not fleet.clusters.shared_uplink:
        return fleet
    many = np.ones(fleet.clients)
    for cluster in fleet.clusters.each:
        if conducts_clusters(policy):
            many[list(cluster.members)] = policy.reports(cluster.size)
        elif policy.synchronous:  # each cluster has its part of the cohort
            many[list(cluster.members)] = max(1.0, (policy.cohort or fleet.clients) * cluster.size / fleet.clients)
    return replace(fleet, up_latency=fleet.up_latency * many, up_bandwidth=fleet.up_bandwidth / many)


def blocks(fleet: Fleet, policy: ClusterPolicy, seed: int) -> Blocks:
    """The clusters as the engine sees them."""
    clusters = each(fleet)
    return Blocks(
        tuple(cluster.members for cluster in clusters),
        tuple(phases(cluster, policy) for cluster in clusters),
        policy.every,
        lambda cluster, job: policy.reporters(seed, cluster, job, clusters[cluster].size),
    )


def crowd(fleet: Fleet, policy: ClusterPolicy, seed: int, vector_bytes: float) -> Crowd:
    """The clusters as the account sees them."""
    clusters, devices = each(fleet), fleet.durations(seed, 0.0, 0.0)
    members, sizes = [cluster.members for cluster in clusters], [cluster.size for cluster in clusters]
    sent = [[2 * cluster.size] if policy.edge else cluster.sends() for cluster in clusters]

    def behind(cluster: int, job: int) -> Sequence[int]:
        if policy.edge:
            return members[cluster]
        return [members[cluster][place] for place in policy.reporters(seed, cluster, job, sizes[cluster])]

    def computing(cluster: int, job: int, steps: int) -> float:
        return sum(devices.compute(device, job, steps) for device in members[cluster])

    def exchanged(cluster: int, job: int, steps: int) -> float:
        many, first, turns = policy.exchanges(steps), job * policy.exchanges(steps), sent[cluster]
        full, rest = divmod(many, len(turns))
        models = full * sum(turns) + sum(turns[(first + turn) % len(turns)] for turn in range(rest))
        return models * vector_bytes

    return Crowd(members, behind, [policy.reports(size) for size in sizes], exchanged, computing, policy.server)
