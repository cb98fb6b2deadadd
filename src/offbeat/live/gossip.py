"""Devices of a cluster exchange models directly, neighbour to neighbour: X <- W (X - lr G), each row where it belongs.

After every few local steps a device sends its model to all who weigh it, waits for all that it weighs, and takes the
weighted mean. Neighbours know each other by their certificates, as the server named them with the job. One that does
not come within a lease has vanished, and the cluster's job is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from mmap import mmap
from typing import Any

import torch
from grpc import aio
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.live import transport
from offbeat.live.arriving import Arriving
from offbeat.live.jobs import Worker
from offbeat.live.packets import Layout, model_layout
from offbeat.live.wire import (
    Accepted,
    Chunk,
    End,
    Gossip,
    Neighbour,
    Rejected,
    WireError,
    chunks,
    decode,
    digest,
    encode,
)
from offbeat.records import Begun

AHEAD = 2  # exchanges that a neighbour may be ahead of a device; what is further off is refused for now


class Vanished(OffbeatError):
    """A neighbour does not answer."""


class Gossiper:
    """One device among its neighbours."""

    def __init__(self, keys: transport.Keys | None, patience: float) -> None:
        self.keys, self.patience = keys, patience
        self.run, self.plan = "", Gossip(-1, -1, 0, -1, 1, 0, False, [], [])
        self.turn = 0  # the exchange that it is at
        self.layout: Layout | None = None
        self.mail: dict[tuple[int, int, int], bytearray | mmap] = {}  # job, turn, place
        self.news = asyncio.Event()
        self.channels: dict[str, aio.Channel] = {}
        self.server: aio.Server | None = None
        self.bytes = 0

    async def listen(self, address: str) -> str:
        """Take models from neighbours; the address that they find this device at."""
        self.server, port = await transport.listen(address, self.keys, {transport.NEIGHBOUR: self.receive}, 256)
        return f"{address.rpartition(':')[0]}:{port}"

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()
        if self.server is not None:
            await self.server.stop(0.2)

    def begin(self, run: str, plan: Gossip) -> None:
        """From now on models of this job are taken."""
        self.run, self.plan, self.turn = run, plan, 0
        self.mail = {key: model for key, model in self.mail.items() if key[0] == plan.job}

    # ---- coming in ------------------------------------------------------------------------------
    async def receive(self, _: Any, context: Any) -> None:
        with contextlib.suppress(WireError, asyncio.TimeoutError):
            opening = decode(await asyncio.wait_for(context.read(), self.patience))
            if not isinstance(opening, Neighbour):
                raise WireError("a neighbour sends models")
            name = transport.peer_of(context).name
            near = {place: known for place, known, _ in self.plan.neighbours}
            ours = (opening.run, opening.cluster, opening.job) == (self.run, self.plan.cluster, self.plan.job)
            if not ours or self.layout is None or not self.turn <= opening.turn < self.turn + AHEAD:
                await context.write(encode(Rejected(max(-1, opening.job), "not now", True)))
                return
            if opening.place not in near or (self.keys is not None and near[opening.place] != name):
                await context.write(encode(Rejected(opening.job, f"'{name}' is no neighbour there", False)))
                return
            arriving = Arriving(opening, self.layout.size)
            while not transport.ended(frame := await asyncio.wait_for(context.read(), self.patience)):
                record = decode(frame)
                if isinstance(record, Chunk):
                    arriving.add(record)
                elif isinstance(record, End) and arriving.problem(record) is None:
                    self.mail[opening.job, opening.turn, opening.place] = arriving.buffer
                    self.news.set()
                    await context.write(encode(Accepted(opening.job)))
                    return
                else:
                    raise WireError("a neighbour sends models, whole")

    # ---- going out ------------------------------------------------------------------------------
    async def give(self, name: str, address: str, opening: Neighbour, buffer: bytearray, mark: str) -> None:
        """Send a model to one neighbour until it has it."""
        for _ in range(1 << 30):
            with contextlib.suppress(aio.AioRpcError, WireError, asyncio.InvalidStateError, aio.UsageError):
                if address not in self.channels:
                    self.channels[address] = transport.dial(address, self.keys, name if self.keys else None)
                stream = transport.call(self.channels[address], transport.NEIGHBOUR)
                for record in (opening, *chunks(memoryview(buffer)), End(mark)):
                    frame = encode(record)
                    self.bytes += len(frame)
                    await stream.write(frame)
                await stream.done_writing()
                frame = await stream.read()
                answer = None if transport.ended(frame) else decode(frame)
                if isinstance(answer, Accepted):
                    return
                if isinstance(answer, Rejected) and not answer.again:
                    raise Vanished(f"{name} refuses: {answer.reason}")
            await asyncio.sleep(0.02)

    async def heard(self, job: int, turn: int, places: list[int]) -> list[bytearray | mmap]:
        """The models of these neighbours at this exchange."""
        while missing := [place for place in places if (job, turn, place) not in self.mail]:
            self.news.clear()
            await self.news.wait()
            assert missing
        return [self.mail.pop((job, turn, place)) for place in places]

    async def exchange(self, model: Tensor, number: int) -> Tensor:
        """One exchange of models: the weighted mean of this device's and its neighbours'."""
        plan, layout = self.plan, self.layout
        assert layout is not None
        turn, row = self.turn, plan.turns[number % len(plan.turns)]
        where = {place: (name, address) for place, name, address in plan.neighbours}
        buffer = layout.pack({"model": model}, lambda _: 0)
        mark = digest(buffer)
        opening = Neighbour(self.run, plan.cluster, plan.job, turn, plan.place, len(buffer))
        gives = [self.give(*where[place], opening, buffer, mark) for place, _, wants in row if wants and place in where]
        weighed = [place for place, weight, _ in row if weight and place in where]
        heard = asyncio.create_task(self.heard(plan.job, turn, weighed))
        tasks: list[asyncio.Task[Any]] = [heard, *(asyncio.create_task(give) for give in gives)]
        try:
            done, late = await asyncio.wait(tasks, timeout=self.patience, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if late:
                raise Vanished(f"a neighbour did not come within {self.patience:g} s")
            models = heard.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.turn += 1
        by_place = {
            place: layout.unpack(raw, model.device)["model"] for place, raw in zip(weighed, models, strict=True)
        }
        by_place[plan.place] = model
        mean = torch.zeros_like(model)
        for place, weight in sorted((place, weight) for place, weight, _ in row if weight):
            mean += weight * by_place[place]
        return mean

    async def job(self, worker: Worker, begun: Begun, packet: bytearray, wait: Callable[[int], Any]) -> bytes:
        """A device's part in a job of its cluster: the update, whether it is to report or not."""
        self.layout = model_layout(worker.problem.model)
        plan = self.plan
        walk = await asyncio.to_thread(worker.walk, begun, packet)
        for step in range(0, begun.steps, plan.every):
            many = min(plan.every, begun.steps - step)
            await asyncio.to_thread(worker.steps_of, walk, step, many)
            await wait(step + many)
            if plan.turns and many == plan.every:
                phase = begun.job * (begun.steps // plan.every) + step // plan.every
                for turn in range(plan.rounds):
                    walk.iterate = await self.exchange(walk.iterate, phase * plan.rounds + turn)
        return await asyncio.to_thread(worker.end_walk, walk, begun)
