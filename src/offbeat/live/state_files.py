"""The state of a live run on the disk, beside its journal.

A restart makes every commit after the newest state again, from the payloads of its updates; so a payload goes when a
state that its commit went into is durable. States are written by a thread of their own, now and then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file

from offbeat.live.journal import FACT, FORGET, Journal
from offbeat.live.live_engine import LiveEngine
from offbeat.method import State
from offbeat.records import JobName
from offbeat.runs.disk import read_tensors, sync, write_file

ROOM = 8 << 20  # bytes of payloads that may wait, besides four times the state's, before the state is written


class StateFiles:
    """Writes and reads states. One thread speaks to it."""

    def __init__(self, journal: Journal, engine: LiveEngine) -> None:
        self.journal, self.engine = journal, engine
        self.consumed: list[JobName] = []  # payloads that the next state makes superfluous
        self.consumed_bytes = 0
        self.saving: Future[None] | None = None
        self.disk = ThreadPoolExecutor(1, "state")

    def consume(self, jobs: Iterable[JobName], size: int) -> None:
        """A commit has taken these jobs, whose payloads have so many bytes each."""
        before = len(self.consumed)
        self.consumed += jobs
        self.consumed_bytes += (len(self.consumed) - before) * size

    @property
    def due(self) -> bool:
        state = sum(t.nbytes for t in self.engine.server.state.values())
        return self.consumed_bytes > 4 * state + ROOM

    def write(self, packets: Mapping[int, bytearray], wait: bool = False) -> None:
        """Write the state, with the versions on the wire that clients still start from. One at a time: while a state
        is being written, the next one waits for its turn, unless the caller waits."""
        if self.saving is not None and not self.saving.done() and not wait:
            return
        server = self.engine.server
        tensors = {name: t for name, t in server.save().items() if not name.startswith("version/")}
        tensors = {
            name: t.detach().to("cpu", copy=name.startswith("memory/")).contiguous() for name, t in tensors.items()
        }
        tensors |= {f"packet/{v}": torch.frombuffer(packet, dtype=torch.uint8) for v, packet in packets.items()}
        facts = {"version": server.version, "updates": self.engine.updates}
        jobs, self.consumed, self.consumed_bytes = self.consumed, [], 0
        self.saving = self.disk.submit(self.save, f"state-{server.version}.safetensors", tensors, facts, jobs)
        if wait:
            self.saving.result()

    def save(self, name: str, tensors: State, facts: dict[str, Any], jobs: list[JobName]) -> None:
        """In the thread: the state first, then the journal's word for it, then the payloads."""
        folder = self.journal.folder
        write = partial(save_file, tensors, metadata={"facts": json.dumps(facts)})
        write_file(folder / name, lambda at: write(filename=at))
        sync(folder)
        self.journal.apply([(FACT, ("state", json.dumps(name))), *((FORGET, job) for job in jobs)])
        for job in jobs:
            self.journal.payload(*job).unlink(missing_ok=True)
        for file in folder.glob("state-*.safetensors"):
            if file.name != name:
                file.unlink()

    def read(self) -> tuple[int, dict[int, bytearray]] | None:
        """The server as the newest state has it: how many commits are in it, and the versions on the wire."""
        if (name := self.journal.fact("state")) is None:
            return None
        tensors, facts = read_tensors(self.journal.folder / name)
        packets = {n: t for n, t in tensors.items() if n.startswith("packet/")}
        server = self.engine.server
        server.restore({n: t for n, t in tensors.items() if n not in packets}, facts["version"])
        self.engine.updates = facts["updates"]
        return int(facts["version"]), {int(n.split("/")[1]): bytearray(t.numpy().tobytes()) for n, t in packets.items()}

    def check(self) -> None:
        """Raises what the last state could not be written for."""
        if self.saving is not None and self.saving.done():
            self.saving.result()

    def close(self) -> None:
        self.disk.shutdown()
