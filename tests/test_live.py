"""Live runs with real processes on a loopback: the same method file, killed at any moment, replayed event for event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from live_world import World, digits, world
from offbeat import replay, resume
from offbeat.errors import OffbeatError
from offbeat.live.verify import verify
from offbeat.records import Begun, Finished
from offbeat.runs.stored import read_trace

SGD = {"local_steps": 3, "client_lr": 0.1}
STEPS = {"name": "equal", "local_steps": [2, 5, 3]}
FAMILIES: dict[str, dict[str, Any]] = {
    "rounds": digits({"name": "local-sgd", "n": 2, **SGD}),
    "over-selection and deadline": digits({"name": "local-sgd", "n": 2, "over_selection": 1.5, "deadline": 2.0, **SGD}),
    "fedbuff": digits({"name": "fedbuff", "buffer_size": 2, "beta": 0.2, "stages": "int8", **SGD}),
    "fedbuff by its own steps": digits({"name": "fedbuff", "buffer_size": 2, "client_lr": 0.1}, fleet=STEPS),
    "fedasync": digits({"name": "fedasync", **SGD}),
    "asysg": digits({"name": "asysg", "n": 2, "stages": "bfloat16"}),
    "dlsgd-homo": digits({"name": "dlsgd-homo", "n": 2, **SGD}),
    "dlsgd-hetero": digits({"name": "dlsgd-hetero", "n": 2, **SGD}),
    "dlsgd-hetero in turn": digits({"name": "dlsgd-hetero", "n": 2, "overlap": False, **SGD}),
    "fedagrac": digits({"name": "fedagrac", "client_lr": 0.1}, fleet=STEPS),
    "fedagrac, sampled": digits({"name": "fedagrac", "n": 2, "client_lr": 0.1, "stages": "float16"}, fleet=STEPS),
    "scaffold": digits({"name": "scaffold", "n": 2, **SGD}),
    "scaffold, option I": digits({"name": "scaffold", "option": "I", "start": "gradients", **SGD}),
    "fednova": digits({"name": "fednova", "client_lr": 0.1}, fleet=STEPS),
    "fedlin": digits({"name": "fedlin", "client_lr": 0.1}, fleet=STEPS),
}
CLUSTERS = {"name": "hlsgd", "clusters": {"count": 2, "graph": "ring"}}
GOSSIP = {"name": "hl-sgd", "local_steps": 4, "client_lr": 0.1, "gossip_every": 2}
FAMILIES["hl-sgd"] = digits({**GOSSIP, "p": 0.5}, 6, fleet=CLUSTERS)
FAMILIES["hl-sgd, twice, int8"] = digits({**GOSSIP, "gossip_rounds": 2, "stages": "int8"}, 6, fleet=CLUSTERS)
SHORT = ("fedbuff",)


def require_same(live: World, commits: int) -> None:
    """The run ended where it should, and the simulator says the same of every event and of the model."""
    result = live.result()
    assert "ok" in result, (result, live.errors())
    assert result["ok"]["commits"] == commits
    found = verify(live.out)
    assert found.within, str(found)
    assert found.commits == commits
    assert found.model is not None, str(found)
    print(found)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.soak) for name in FAMILIES]
)
def test_a_live_run_replays_event_for_event(name: str, tmp_path: Path) -> None:
    with world(tmp_path, FAMILIES[name]) as live:
        live.serve()
        live.join_all(**({"listen": "127.0.0.1:0"} if "hl-sgd" in name else {}))
        require_same(live, 6)
        for client in range(live.table["task"]["clients"]):
            assert live.result(f"client-{client}")["ok"]["ended"] == "commits 6 >= 6"
        for act in (resume, replay):
            with pytest.raises(OffbeatError, match="holds a live run"):
                act(live.out)


def test_a_limit_on_seconds_ends_a_run_where_its_replay_ends(tmp_path: Path) -> None:
    """Commits come faster than the server looks at its limits."""
    with world(tmp_path, digits(FAMILIES["fedasync"]["method"], until={"virtual_seconds": 1.0}), plain=True) as live:
        live.serve()
        live.join_all()
        result = live.result()["ok"]
        assert result["ended"] == "virtual_seconds: the next commit comes after 1.0 s"
        assert result["virtual_seconds"] <= 1.0
        require_same(live, result["commits"])


def test_killed_servers_and_clients_come_back(tmp_path: Path) -> None:
    """SCAFFOLD: what clients remember must survive too, or the model would not be the simulator's."""
    table = digits({"name": "scaffold", "n": 2, **SGD}, until={"commits": 12})
    with world(tmp_path, table) as live:
        live.serve()
        second = World(tmp_path, table, address="127.0.0.1:0")
        second.serve()
        assert "is in use by process" in second.result()["error"]
        live.join_all(step_seconds=0.05)
        for at in (2, 5):
            live.until(lambda at=at: live.commits() >= at, f"for commit {at}")
            live.kill(live.server)
            if at == 5:
                live.kill(live.clients[1])
                live.join(1, step_seconds=0.05)
            live.serve()
        live.until(lambda: live.commits() >= 8)
        live.kill(live.clients[2])
        live.join(2, step_seconds=0.05)
        require_same(live, 12)
        assert live.result()["ok"]["live"]["epochs"] == 3
        assert not (live.out / "journal.sqlite3").exists()


def test_streams_go_on_behind_the_finished_jobs(tmp_path: Path) -> None:
    """Jobs of different lengths, a server and a client that are killed: the simulator reads the same rows."""
    fleet = {"name": "equal", "local_steps": {"law": "uniform", "low": 1, "high": 6, "mode": "random"}}
    table = digits({"name": "fedbuff", "buffer_size": 2, "client_lr": 0.1}, fleet=fleet, until={"commits": 14})
    table["task"]["sampling"] = "in-order-continued"
    with world(tmp_path, table, plain=True) as live:
        live.serve()
        live.join_all(step_seconds=0.02)
        live.until(lambda: live.commits() >= 3, "for commit 3")
        live.kill(live.clients[1])
        live.join(1, step_seconds=0.02)
        live.until(lambda: live.commits() >= 7, "for commit 7")
        live.kill(live.server)
        live.serve()
        require_same(live, 14)
    done = dict.fromkeys(range(3), 0)
    begun: dict[int, Begun] = {}
    for _, record in read_trace(live.out):
        if isinstance(record, Begun):
            assert record.steps_before == done[record.client]
            begun[record.client] = record
        elif isinstance(record, Finished):
            done[record.client] += begun[record.client].steps
    assert len({job.steps_before // (job.job or 1) for job in begun.values()}) > 1


@pytest.mark.soak
def test_a_server_that_is_asked_to_stop_goes_on_later(tmp_path: Path) -> None:
    table = digits({"name": "dlsgd-hetero", "n": 2, **SGD}, until={"commits": 8})
    with world(tmp_path, table, plain=True) as live:
        live.serve()
        live.join_all(step_seconds=0.02)
        live.until(lambda: live.commits() >= 2)
        live.server.terminate()
        assert live.result()["kind"] == "Interrupted"
        live.serve()
        require_same(live, 8)


@pytest.mark.soak
def test_a_neighbour_that_vanishes_gives_the_clusters_job_back(tmp_path: Path) -> None:
    table = digits({**GOSSIP, "p": 0.5}, 6, fleet=CLUSTERS, until={"commits": 10})
    with world(tmp_path, table) as live:
        live.serve()
        live.join_all(listen="127.0.0.1:0", step_seconds=0.05)
        for at, device in ((2, 1), (5, 4)):
            live.until(lambda at=at: live.commits() >= at)
            live.kill(live.clients[device])
            live.join(device, listen="127.0.0.1:0", step_seconds=0.05)
        live.until(lambda: live.commits() >= 7)
        live.kill(live.server)
        live.serve()
        require_same(live, 10)
