"""Default rates: with nothing set, the loss of every method falls on the tasks that come with the package."""

from __future__ import annotations

import pytest

from offbeat import METHODS, Experiment, run

CLUSTERED = ("async-hl-sgd", "gossip-pga", "gossip-sgd", "hierarchical-local-sgd", "hl-sgd")
TASKS = {"digits": 100, "quadratic": 10}


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls_in_a_hundred_commits(method, task):
    fleet = {"name": "straggling"}
    if method in CLUSTERED:
        clients, one = TASKS[task], method in ("gossip-sgd", "gossip-pga")
        fleet["clusters"] = {"sizes": [clients] if one else [clients // 2, clients - clients // 2]}
    looks = {"every_commits": 25}
    outcome = run(
        Experiment(method=method, task=task, fleet=fleet, device="cpu", until={"commits": 100}, evaluate=looks)
    )
    losses = [row["loss"] for row in outcome.metrics]
    assert losses[-1] < losses[0]
    assert outcome.diverging is None


@pytest.mark.soak
def test_every_method_learns_with_its_defaults():
    for name in METHODS:
        clusters = 1 if name.startswith("gossip") else 10  # those that need none do not mind them
        fleet = {"name": "straggling", "clusters": clusters}
        commits = {"fedasync": 2000, "async-hl-sgd": 400}.get(name, 200)
        made = run(Experiment(method=name, fleet=fleet, device="cpu", until={"commits": commits}))
        assert made.accuracy_best > 0.8, (name, made.accuracy_best)
