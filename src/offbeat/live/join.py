"""A client: joins a server, computes what it is given, and comes back by itself when it is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpc import aio

from offbeat.errors import Interrupted, OffbeatError
from offbeat.live import transport
from offbeat.live.arriving import Arriving
from offbeat.live.gossip import Gossiper, Vanished
from offbeat.live.hand import Hand, Work
from offbeat.live.jobs import Shard, Worker, read_shard, shard_of
from offbeat.live.outlet import Outlet
from offbeat.live.wire import (
    PROTOCOL,
    Accepted,
    Began,
    Chunk,
    Done,
    Drop,
    End,
    Fetch,
    Gossip,
    Hello,
    Leave,
    Offer,
    Order,
    Over,
    Ping,
    Pong,
    Prime,
    Primed,
    Ready,
    Refused,
    Rejected,
    Replaced,
    Update,
    Void,
    Welcome,
    WireError,
    decode,
    encode,
)
from offbeat.records import Begun

log = logging.getLogger("offbeat.join")
FIRST, LONGEST = 0.2, 15.0  # seconds between two attempts to connect: at first, and at most
ANSWER = 20.0  # seconds that a server has to answer a first word


class Client:
    """One client, over as many connections as it takes."""

    def __init__(
        self, address: str, data: str | Shard | None, keys: transport.Keys | None = None, client: int = -1,
        device: str = "auto", state: Path | None = None, code: tuple[str, ...] = (), local_steps: int | None = None,
        step_seconds: float = 0.0, patience: float = 600.0, listen: str | None = None,
    ) -> None:  # fmt: skip
        transport.require_address(address, keys)
        self.address, self.keys, self.claimed = address, keys, client if keys is None else -1
        self.shard = read_shard(data) if isinstance(data, str) else data
        self.device, self.state, self.code = device, state, frozenset(code)
        self.local_steps, self.step_seconds, self.patience = local_steps, step_seconds, patience
        self.listening, self.reached_at = listen, ""
        self.gossiper: Gossiper | None = None
        self.plan: Gossip | None = None  # of the cluster's job that comes next
        self.worker: Worker | None = None
        self.run_id, self.epoch, self.client = "", 0, -1
        self.hand = Hand(False, False)  # until the server says
        self.known = -1  # the last finished job that the server has on record, as far as it said
        self.outlet: Outlet | None = None
        self.changed = asyncio.Event()
        self.stopped = asyncio.Event()
        self.over: str | None = None
        self.refused: str | None = None
        self.rng = random.Random()  # of its own: draws of jobs are watched
        self.process = f"{self.rng.getrandbits(64):016x}"
        self.lag = 0.0
        self.heartbeat, self.lease = 5.0, 30.0  # until the server says
        self.counts = {"jobs": 0, "accepted": 0, "rejected": 0, "connections": 0, "bytes_up": 0, "bytes_down": 0}

    # ---- life -----------------------------------------------------------------------------------
    async def run(self) -> dict[str, Any]:
        """Until the run is over, the server refuses for good, somebody stops this client, or patience ends."""
        working = asyncio.create_task(self.work())
        contact, delay = time.monotonic(), FIRST
        try:
            while self.over is None and self.refused is None and not self.stopped.is_set():
                before = self.counts["connections"]
                reason = await self.connect(working)
                if working.done() and working.exception() is not None:
                    raise working.exception()  # type: ignore[misc]
                if self.counts["connections"] > before:
                    contact, delay = time.monotonic(), FIRST
                if self.over is not None or self.refused is not None or self.stopped.is_set():
                    break
                if time.monotonic() - contact > self.patience:
                    raise OffbeatError(
                        f"{self.address} was not there, or did not let this client in, for {self.patience:.0f} s "
                        f"({reason}); is the server running, does it know this client's certificate, and is the clock "
                        "of this machine right?"
                    )
                log.info("cut off", extra={"facts": {"reason": reason, "again_in": delay}})
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.stopped.wait(), delay * self.rng.uniform(0.5, 1.0))
                delay = min(LONGEST, max(1.0, self.lease / 3), 2 * delay)  # some attempts within a lease
        finally:
            working.cancel()
            if self.gossiper is not None:
                await self.gossiper.close()
        if self.refused is not None:
            raise OffbeatError(f"{self.address} refuses: {self.refused}")
        if self.over is None:
            raise Interrupted("stopped; the server was told, and gives the job to others")
        return {"ended": self.over, "client": self.client, "run": self.run_id, **self.counts}

    async def connect(self, working: asyncio.Task[None]) -> str:
        """One connection, from the first word to its end; the reason of the end."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            async with transport.dial(self.address, self.keys) as channel:
                stream = transport.call(channel)
                await stream.write(encode(Hello(PROTOCOL, self.claimed, self.process)))
                first = await asyncio.wait_for(self.read(stream), ANSWER)
                if not isinstance(first, Welcome):
                    return self.hear_refusal(first)
                await self.enter(first)
                self.outlet = Outlet(stream.write)
                self.counts["connections"] += 1
                self.resume()
                tasks = [asyncio.create_task(part) for part in (self.outlet.run(), self.listen(stream), self.beat())]
                tasks.append(asyncio.create_task(self.stopped.wait(), name="stopped"))
                done, _ = await asyncio.wait([*tasks, working], return_when=asyncio.FIRST_COMPLETED)
                if self.stopped.is_set() and self.over is None:
                    self.outlet.say(Leave("stopped"))
                    self.outlet.end()
                    await asyncio.wait((tasks[0],), timeout=2.0)
                    await stream.done_writing()
                    await asyncio.sleep(0.1)
                failures = [task.exception() for task in done if not task.cancelled() and task.exception() is not None]
                return str(failures[0]) if failures else "the connection ended"
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except (WireError, asyncio.TimeoutError, OSError, aio.UsageError, asyncio.InvalidStateError) as error:
            return str(error) or type(error).__name__
        finally:
            if self.outlet is not None:
                self.counts["bytes_up"] += self.outlet.bytes
            self.outlet = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def read(self, stream: Any) -> Any:
        frame = await stream.read()
        if transport.ended(frame):
            raise WireError("the server ended the connection")
        self.counts["bytes_down"] += len(frame)
        return decode(frame)

    def hear_refusal(self, record: Any) -> str:
        if isinstance(record, Over):
            self.over = record.reason
        if isinstance(record, Refused):
            self.refused = record.reason if record.final else None
            return record.reason
        return f"the server began with {type(record).__name__}"

    # ---- coming in ------------------------------------------------------------------------------
    async def enter(self, welcome: Welcome) -> None:
        if self.worker is None or welcome.run != self.run_id:
            await self.begin_run(welcome)
        assert self.worker is not None
        self.heartbeat, self.lease, self.epoch = welcome.heartbeat, welcome.lease, welcome.epoch
        if self.worker.method.when.speaks_of == "clusters" and self.gossiper is None and self.listening is not None:
            self.gossiper = Gossiper(self.keys, self.lease)
            self.reached_at = await self.gossiper.listen(self.listening)
        self.hand.connected(welcome)
        self.know(welcome.finished)

    async def begin_run(self, welcome: Welcome) -> None:
        """A run that this client has not seen: nothing of another one counts."""
        try:
            worker = await asyncio.to_thread(
                Worker, welcome.client, welcome.clients, welcome.config, welcome.facts, self.shard, self.device,
                self.code, self.local_steps, self.state,
            )  # fmt: skip
        except OffbeatError as error:
            raise ClientCannot(str(error)) from None
        await asyncio.to_thread(worker.rehearse)
        if worker.digest != welcome.model:
            raise ClientCannot(
                "the model here differs from the server's: its parameters have other names, shapes or types"
            )
        self.worker, self.run_id, self.client, self.known = worker, welcome.run, welcome.client, -1
        self.hand = Hand(worker.method.when.holds, worker.method.when.overlaps)
        if worker.recall(welcome.run) and worker.kept is not None:
            self.hand.keep(worker.kept)

    def know(self, finished: int) -> None:
        """What the server has as the last finished job; while one is computed, its end looks at it."""
        self.known = finished
        if self.worker is not None and self.hand.current is None:
            self.worker.settle(max([finished, *(begun.job for begun, _ in self.hand.finished())]))

    def resume(self) -> None:
        """Say what is in hand, and send again what was not answered."""
        assert self.worker is not None
        shard, worker = self.worker.shard, self.worker
        held = self.hand.held()
        self.say(Ready(worker.digest, len(shard.x), shard.digest, held, worker.last, self.reached_at))
        for begun, packet in list(self.hand.unheard.values()):
            self.send(begun, packet)
        self.changed.set()

    def say(self, record: Any) -> None:
        """Nothing is lost where nobody listens: `resume` says it all again."""
        if self.outlet is not None:
            self.outlet.say(record)

    # ---- listening ------------------------------------------------------------------------------
    async def listen(self, stream: Any) -> None:
        arriving: Arriving | None = None
        assert self.worker is not None
        while True:
            record = await asyncio.wait_for(self.read(stream), max(self.lease, 2 * self.heartbeat))
            if isinstance(record, Chunk | End):
                if arriving is not None and isinstance(record, Chunk):
                    arriving.add(record)
                elif arriving is not None and isinstance(record, End):
                    if problem := arriving.problem(record):
                        raise WireError(f"a model: {problem}")
                    await self.take(arriving)
                    arriving = None
            elif isinstance(record, Order | Offer | Prime):
                arriving = Arriving(record, self.worker.down.size)
            elif isinstance(record, Drop):
                arriving = None
                self.drop(record)
            elif isinstance(record, Gossip):
                self.plan = record
            elif self.hear(record):
                return

    async def take(self, arriving: Arriving) -> None:
        """A model is there."""
        opening, packet = arriving.opening, arriving.buffer
        assert self.worker is not None
        assert isinstance(packet, bytearray)
        if isinstance(opening, Prime):
            gradient = await asyncio.to_thread(self.worker.prime, packet)
            if self.outlet is not None:
                self.outlet.send(Primed(self.run_id, len(gradient)), gradient)
        elif isinstance(opening, Order) or opening.version > self.hand.seen:
            self.hand.inbox = Work(opening.version, opening.steps, packet, time.monotonic())
            self.changed.set()

    def hear(self, record: Any) -> bool:
        """Whether that was the last word."""
        if isinstance(record, Fetch):
            if (finished := self.hand.fetch()) is not None:
                self.send(*finished)
        elif isinstance(record, Void):
            if self.hand.void(record):
                self.know(record.finished)
            self.changed.set()
        elif isinstance(record, Accepted):
            self.counts["accepted"] += self.hand.accepted(record.job)
            self.changed.set()
        elif isinstance(record, Rejected):
            self.reject(record)
        elif isinstance(record, Pong):
            self.lag = max(1e-6, time.monotonic() - self.pinged)
        elif isinstance(record, Over):
            self.over = record.reason
            return True
        elif isinstance(record, Refused):
            self.refused = record.reason if record.final else None
            return True
        return False

    def drop(self, record: Drop) -> None:
        self.hand.drop(record)
        if self.outlet is not None:
            self.outlet.abort()
        self.know(record.finished)
        self.changed.set()

    def reject(self, record: Rejected) -> None:
        self.counts["rejected"] += 1
        log.warning("update refused", extra={"facts": record._asdict()})
        if not record.again:
            self.hand.give_up(record.job)
            self.changed.set()
        elif record.job in self.hand.unheard:
            asyncio.get_running_loop().call_later(self.rng.uniform(1.0, 3.0), self.send_again, record.job)

    def send_again(self, job: int) -> None:
        if job in self.hand.unheard:
            self.send(*self.hand.unheard[job])

    async def beat(self) -> None:
        for number in range(1 << 62):
            self.pinged = time.monotonic()
            self.say(Ping(number, self.lag, [job[0] for job in self.hand.held()]))
            await asyncio.sleep(self.heartbeat)

    pinged = 0.0

    # ---- working --------------------------------------------------------------------------------
    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            self.changed.clear()
            await self.changed.wait()

    async def dropped(self, begun: Begun) -> None:
        await self.until(lambda: self.hand.current is not begun)

    async def work(self) -> None:
        """One job after the other, whether the server is there or not."""
        while True:
            await self.until(lambda: self.hand.ready())
            assert self.worker is not None
            worker = self.worker
            if self.plan is not None:  # a job of a cluster: the server numbers it and places it in the stream
                self.hand.number, self.hand.steps_before = self.plan.job, self.plan.steps_before
            number = self.hand.number
            begun, work = self.hand.begin(self.client, number, worker.steps(number), self.epoch)
            began = time.monotonic()
            self.say(Began(*begun[1:], began - work.since))
            if self.gossiper is not None and self.plan is not None:
                await self.gossip(self.gossiper, worker, begun, work.packet)
                continue
            update = await asyncio.to_thread(worker.compute, begun, work.packet)
            rest = began + self.step_seconds * begun.steps - time.monotonic()
            if rest > 0 and self.hand.current is begun:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.dropped(begun), rest)
            self.counts["jobs"] += 1
            if self.hand.current is not begun:  # it was dropped in between
                worker.settle(self.known)
                continue
            self.say(Done(begun.job))
            finished, replaced = self.hand.finish((begun, update))
            if replaced is not None:
                self.say(Replaced(replaced.job))
            if finished is not None:
                self.send(*finished)

    async def gossip(self, gossiper: Gossiper, worker: Worker, begun: Begun, packet: bytearray) -> None:
        """This device's part in a job of its cluster; it ends early if the job is dropped or a neighbour vanishes."""
        plan, began = self.plan, time.monotonic()
        assert plan is not None
        gossiper.begin(self.run_id, plan)

        async def wait(steps: int) -> None:
            await asyncio.sleep(max(0.0, began + steps * self.step_seconds - time.monotonic()))

        job = asyncio.create_task(gossiper.job(worker, begun, packet, wait))
        dropped = asyncio.create_task(self.dropped(begun))
        await asyncio.wait((job, dropped), return_when=asyncio.FIRST_COMPLETED)
        for task in (job, dropped):
            task.cancel()
        ends = await asyncio.gather(job, dropped, return_exceptions=True)
        self.counts["jobs"] += 1
        if self.hand.current is not begun:
            return
        self.hand.current = None
        if isinstance(ends[0], Vanished):
            log.warning("neighbour vanished", extra={"facts": {"why": str(ends[0])}})
            self.say(Replaced(begun.job))
        elif isinstance(ends[0], BaseException):
            raise ends[0]
        else:
            self.say(Done(begun.job))
            if plan.reports:
                self.send(begun, ends[0])

    def send(self, begun: Begun, update: bytes) -> None:
        self.hand.sent((begun, update))
        if self.outlet is not None:
            epoch = self.hand.epochs.get(begun.job, self.epoch)
            self.outlet.send(Update(self.run_id, epoch, *begun[1:4], len(update)), update)


class ClientCannot(OffbeatError):
    """This client cannot run the server's experiment."""


async def joined(client: Client) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(number, client.stopped.set)
    return await client.run()


def join(
    address: str, data: Any, keys: str | Path | None = None, name: str | None = None, client: int = -1, **options: Any
) -> dict[str, Any]:
    """Take part in the run of the server at `address` until it is over; what this client did.

    `data` is what `--data` takes, `(x, y)`, or a `Task` of one's own whose first shard it is. `keys` is the folder with
    this client's certificate `name`; without one, on a loopback alone, `client` is its number.
    """
    shown = transport.Keys(Path(keys), name or "") if keys is not None else None
    shard = data if isinstance(data, str) else shard_of("data", data)

    async def main() -> dict[str, Any]:
        return await joined(Client(address, shard, shown, client, **options))

    return asyncio.run(main())
