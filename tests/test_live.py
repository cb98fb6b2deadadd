"""Live runs with real processes on a loopback: the same method file, killed at any moment, replayed event for event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from live_world import digits, world
from offbeat.live.verify import verify

FAMILIES: dict[str, Any] = {
    "rounds": {"name": "local-sgd", "n": 2, "local_steps": 3, "client_lr": 0.1},
    "fedbuff": {"name": "fedbuff", "buffer_size": 2, "local_steps": 3, "client_lr": 0.1, "beta": 0.2, "stages": "int8"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_live_run_replays_event_for_event(name: str, tmp_path: Path) -> None:
    with world(tmp_path, digits(FAMILIES[name])) as live:
        live.serve()
        live.join_all()
        result = live.result()["ok"]
        assert result["commits"] == 6
        assert [live.result(f"client-{client}")["ok"]["ended"] for client in range(3)] == ["commits 6 >= 6"] * 3
        found = verify(live.out)
        assert found.within, str(found)
        assert found.commits == 6
        assert found.jobs
        assert found.model is not None
