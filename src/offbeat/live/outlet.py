"""What goes out on a stream: records at once, buffers in pieces between them; no heartbeat waits for a model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from offbeat.live.wire import End, chunks, digest, encode

Buffer = bytes | bytearray | memoryview


class Outlet:
    """Say and send from one thread; `run` writes until `end`. A write that is under way is not broken off: gRPC would
    not write again on that stream."""

    def __init__(self, write: Callable[[bytes], Awaitable[Any]]) -> None:
        self.write = write
        self.records: deque[bytes] = deque()
        self.buffers: deque[tuple[Any, Buffer, str]] = deque()
        self.model: tuple[Any, Buffer, str] | None = None  # the newest one that waits; it overwrites an older one
        self.under_way: Iterator[Any] | None = None
        self.wake = asyncio.Event()
        self.ending = False
        self.bytes = 0

    def say(self, record: Any) -> None:
        self.records.append(encode(record))
        self.wake.set()

    def send(self, opening: Any, buffer: Buffer, mark: str | None = None) -> None:
        """A buffer behind those that wait already."""
        self.buffers.append((opening, buffer, mark or digest(buffer)))
        self.wake.set()

    def offer(self, opening: Any, buffer: Buffer, mark: str) -> None:
        """A model, in the place of one that still waits."""
        self.model = (opening, buffer, mark)
        self.wake.set()

    def abort(self) -> None:
        """Forget what is not sent yet but for records; the other side forgets what it has of it."""
        self.model = self.under_way = None
        self.buffers.clear()

    def pieces(self) -> Iterator[Any] | None:
        waiting, self.model = self.model, None
        if waiting is None and self.buffers:
            waiting = self.buffers.popleft()
        if waiting is None:
            return None
        opening, buffer, mark = waiting
        return iter((opening, *chunks(memoryview(buffer)), End(mark)))

    async def put(self, frame: bytes) -> None:
        self.bytes += len(frame)
        await self.write(frame)

    async def run(self) -> None:
        while True:
            while self.records:
                await self.put(self.records.popleft())
            if self.ending:
                return
            if self.under_way is None:
                self.under_way = self.pieces()
            if self.under_way is None:
                self.wake.clear()
                await self.wake.wait()
                continue
            piece = next(self.under_way, None)
            if piece is None:
                self.under_way = None
            else:
                await self.put(encode(piece))

    def end(self) -> None:
        """Write the records that wait, and no more."""
        self.ending = True
        self.wake.set()
