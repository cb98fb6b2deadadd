"""Real servers and clients on a loopback, each a process of its own, forked from one that has PyTorch loaded."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.live import certificates

fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(
    ["offbeat.live.serve", "offbeat.live.join", "offbeat.live.verify", "sklearn.datasets", "live_world"]
)
PATIENCE = 120.0  # seconds for anything that must happen; nothing waits that long if it does


def digits(method: dict[str, Any] | str, clients: int = 3, **other: Any) -> dict[str, Any]:
    """An experiment's table: digits on a few clients."""
    task = {"name": "digits", "clients": clients, "split": {"name": "dirichlet", "alpha": 1.0}}
    plain = {"method": method, "task": task, "fleet": "equal", "device": "cpu", "until": {"commits": 6}}
    return plain | {"evaluate": {"every_commits": 3}} | other


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ends(target: Any, files: dict[str, Path], *given: Any, **options: Any) -> None:
    """In a process: call, and leave the result or the error in a file; exit 0 or 1."""
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stderr = files["log"].open("a", buffering=1)
    try:
        result = target(*given, **options)
        files["result"].write_text(json.dumps({"ok": result}, default=str))
    except BaseException as error:
        files["result"].write_text(json.dumps({"error": str(error), "kind": type(error).__name__}))
        raise SystemExit(1) from None


def server_main(table: dict[str, Any], out: str, port_file: str, log: str, options: dict[str, Any]) -> Any:
    from offbeat.experiments.experiment import Experiment
    from offbeat.live import serve, transport
    from offbeat.live.checks import Limits
    from offbeat.live.operations import Operations, start_log

    start_log(Path(log))

    operations = Operations(options.pop("metrics", None))

    def announce(server: Any) -> None:
        operations.watch(server)
        Path(port_file + ".new").write_text(str(server.port))
        os.replace(port_file + ".new", port_file)

    keys = options.pop("keys", None)
    limits = Limits.of(options.pop("limits", {}))
    shown = None if keys is None else transport.Keys(Path(keys), "server")
    chosen = serve.Options(keys=shown, limits=limits, **options)
    return serve.serve(Experiment.of(table), out, chosen, None, announce).result


def client_main(address: str, options: dict[str, Any]) -> Any:
    from offbeat.live.join import join

    return join(address, **({"data": "task", "device": "cpu"} | options))


class World:
    """A server and its clients in one folder."""

    def __init__(self, folder: Path, table: dict[str, Any], plain: bool = False, **options: Any) -> None:
        self.folder, self.table, self.plain = folder, table, plain
        self.out, self.keys = folder / "run", folder / "keys"
        self.options = {"heartbeat": 0.3, "lease": 3.0, "address": f"127.0.0.1:{free_port()}", **options}
        clients = table["task"]["clients"]
        if not plain and not self.keys.exists():
            certificates.make(self.keys, [f"client-{number}" for number in range(clients)])
        self.processes: list[Any] = []
        self.server: Any = None
        self.clients: dict[int, Any] = {}

    @property
    def address(self) -> str:
        return str(self.options["address"])

    def files(self, name: str) -> dict[str, Path]:
        return {"result": self.folder / f"{name}.json", "log": self.folder / f"{name}.err"}

    def begin(self, name: str, target: Any, *given: Any) -> Any:
        self.files(name)["result"].unlink(missing_ok=True)
        process = fork.Process(target=ends, args=(target, self.files(name), *given), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def serve(self, wait: bool = True, **changed: Any) -> Any:
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        options = self.options | ({} if self.plain else {"keys": str(self.keys)}) | changed
        log = str(self.folder / "serve.log")
        self.server = self.begin("server", server_main, self.table, str(self.out), str(port_file), log, options)
        if wait:
            self.until(lambda: port_file.exists() or not self.server.is_alive())
        return self.server

    def join(self, client: int, address: str | None = None, **options: Any) -> Any:
        shown = {"client": client} if self.plain else {"keys": str(self.keys), "name": f"client-{client}"}
        given = {**shown, "state": self.folder / f"state-{client}", "patience": 60.0, **options}
        self.clients[client] = self.begin(f"client-{client}", client_main, address or self.address, given)
        return self.clients[client]

    def join_all(self, **options: Any) -> None:
        for client in range(self.table["task"]["clients"]):
            self.join(client, **options)

    def result(self, name: str = "server") -> dict[str, Any]:
        """What a process came to: {"ok": ...} or {"error": ...}."""
        process = self.server if name == "server" else self.clients[int(name.split("-")[1])]
        self.until(lambda: not process.is_alive())
        process.join()
        file = self.files(name)["result"]
        assert file.exists(), self.files(name)["log"].read_text()[-2000:]
        return json.loads(file.read_text())  # type: ignore[no-any-return]

    def until(self, true: Any, what: str = "") -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"waited in vain {what}: {self.errors()}"
            time.sleep(0.02)

    def errors(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in sorted(self.folder.glob("*.err")))

    def log(self) -> list[dict[str, Any]]:
        file = self.folder / "serve.log"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def commits(self) -> int:
        """Commits in the journal, seen from outside."""
        import sqlite3

        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(self.out / "journal.sqlite3")) as base,
        ):
            return int(base.execute("SELECT COUNT(*) FROM rows WHERE kind = 'commit'").fetchone()[0])
        return 0

    def kill(self, process: Any) -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextlib.contextmanager
def world(folder: Path, table: dict[str, Any], **options: Any) -> Iterator[World]:
    one = World(folder, table, **options)
    try:
        yield one
    finally:
        one.close()


# ---- clients that behave badly, or only as if ---------------------------------------------------
def rough_main(address: str, options: dict[str, Any], heard: str, seed: int) -> Any:
    """A client that repeats and delays what it sends, and writes down which of its jobs were acknowledged."""
    import asyncio
    import random

    from offbeat.live.join import Client, joined
    from offbeat.live.transport import Keys
    from offbeat.live.wire import Accepted, Began, Done

    rng = random.Random(seed)

    class Rough(Client):
        def hear(self, record: Any) -> bool:
            if isinstance(record, Accepted):
                with open(heard, "a") as file:
                    file.write(f"{self.client} {record.job}\n")
            return super().hear(record)

        def send(self, begun: Any, update: bytes) -> None:
            if rng.random() < 0.2:  # once more, later: perhaps long after it was taken
                asyncio.get_running_loop().call_later(rng.uniform(0.0, 3.0), super().send, begun, update)
            super().send(begun, update)
            if rng.random() < 0.1:
                super().send(begun, update)

        def say(self, record: Any) -> None:
            super().say(record)
            if isinstance(record, Began | Done) and rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.uniform(0.0, 0.5), super().say, record)

    async def main() -> Any:
        keys = Keys(Path(options["keys"]), options["name"])
        return await joined(Rough(address, "task", keys, device="cpu", state=options["state"], step_seconds=0.01))

    return asyncio.run(main())


async def puppet(address: str, keys: Any, update: bytes, counts: dict[str, int]) -> None:
    """A client without a model: it answers every order at once with the same update."""
    from offbeat.live import transport, wire

    async with transport.dial(address, keys) as channel:
        stream = transport.call(channel)
        await stream.write(wire.encode(wire.Hello(wire.PROTOCOL, -1, "")))
        welcome = wire.decode(await stream.read())
        await stream.write(wire.encode(wire.Ready(welcome.model, 7, "", [], -1, "")))
        counts["connected"] += 1
        number, before, mark, order = 0, 0, wire.digest(update), None
        while True:
            frame = await stream.read()
            if transport.ended(frame):
                return
            record = wire.decode(frame)
            counts["bytes"] += len(frame)
            if isinstance(record, wire.Order):
                order = record
            elif isinstance(record, wire.Over | wire.Refused):
                return
            elif isinstance(record, wire.Accepted):
                counts["accepted"] += 1
            elif isinstance(record, wire.End) and order is not None:
                opening = wire.Update(welcome.run, welcome.epoch, number, order.version, order.steps, len(update))
                for piece in (
                    wire.Began(number, order.version, order.steps, before, 0.0), wire.Done(number), opening,
                    *wire.chunks(memoryview(update)), wire.End(mark),
                ):  # fmt: skip
                    await stream.write(wire.encode(piece))
                number, before = number + 1, before + order.steps


def puppets_main(address: str, folder: str, names: list[str], size: int, progress: str) -> Any:
    """Many puppets in one process."""
    import asyncio
    from collections import Counter

    from offbeat.live.transport import Keys

    counts: Counter[str] = Counter()
    update = bytes(size)

    async def tell() -> None:
        while True:
            Path(progress).write_text(json.dumps(counts))
            await asyncio.sleep(0.5)

    async def main() -> None:
        telling = asyncio.create_task(tell())
        await asyncio.gather(*(puppet(address, Keys(Path(folder), name), update, counts) for name in names))
        telling.cancel()

    asyncio.run(main())
    return dict(counts)
