"""The long trials of a live run, by `make live-soak`: forecast, chaos, load. They print what they found.

OFFBEAT_CHAOS_SECONDS (1200) and OFFBEAT_LOAD_UPDATES (20000) shorten them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from live_world import World, digits, free_port, puppets_main, rough_main, world
from offbeat import Experiment, run
from offbeat.live import certificates, fit
from offbeat.live.verify import verify
from offbeat.records import Arrived, Commit
from offbeat.runs.stored import read_metrics, read_trace

pytestmark = pytest.mark.soak
CHAOS_SECONDS = float(os.environ.get("OFFBEAT_CHAOS_SECONDS", "1200"))
LOAD_UPDATES = int(os.environ.get("OFFBEAT_LOAD_UPDATES", "20000"))


# ---- 1: simulated and live ----------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedbuff", "local-sgd"])
def test_a_live_run_is_what_its_fitted_fleet_forecasts(method: str, tmp_path: Path) -> None:
    size = {"fedbuff": {"buffer_size": 4, "beta": 0.12}, "local-sgd": {"n": None}}[method]
    commits = {"fedbuff": 80, "local-sgd": 40}[method]
    table = digits(
        {"name": method, "local_steps": 5, "client_lr": 0.1, **size}, 8, until={"commits": commits},
        evaluate={"every_commits": 1}, targets=[0.7],
    )  # fmt: skip
    with world(tmp_path, table) as live:
        live.serve()
        for client in range(8):  # two cores are not the bottleneck: each waits out a time of its own
            live.join(client, step_seconds=0.08 * (1 + client % 4))
        result = live.result()["ok"]
        found = verify(live.out)
        assert found.within, str(found)
        fleet = tmp_path / "fleet.json"
        fitted = fit.write(live.out, fleet)
    forecast = run(Experiment.of(table | {"fleet": {"name": "recorded", "file": str(fleet)}}))
    was, said = result["reached"]["0.7"]["virtual_seconds"], forecast.reached["0.7"]["virtual_seconds"]
    curves = [row["accuracy"] for row in read_metrics(live.out)], [row["accuracy"] for row in forecast.metrics]
    accuracy = tuple(fmean(curve[-20:]) for curve in curves)  # single evaluations of an asynchronous run jump
    print(f"\n{method}: 0.7 after {was:.2f} s live, {said:.2f} s forecast; accuracy {accuracy}; {fitted['error']}")
    print(found)
    assert abs(said / was - 1) < 0.2
    assert abs(accuracy[0] - accuracy[1]) < 0.02


# ---- 2: chaos -----------------------------------------------------------------------------------
class Proxy(threading.Thread):
    """Between clients and server: connections are cut in the middle, and bytes wait."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.to, self.rng, self.cuts = port, random.Random(seed), 0
        self.port = free_port()
        self.ready = threading.Event()

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        server = await asyncio.start_server(self.pass_on, "127.0.0.1", self.port)
        self.ready.set()
        async with server:
            await server.serve_forever()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            there = await asyncio.open_connection("127.0.0.1", self.to)
            left = [self.rng.randrange(20_000, 400_000) if self.rng.random() < 0.7 else 1 << 40]
            pipes = [self.pipe(reader, there[1], left), self.pipe(there[0], writer, left)]
            tasks = [asyncio.create_task(pipe) for pipe in pipes]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            for end in (writer, there[1]):
                end.transport.abort()
        writer.transport.abort()

    async def pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]) -> None:
        while data := await reader.read(4096):
            left[0] -= len(data)
            if left[0] < 0:
                self.cuts += 1
                return
            if self.rng.random() < 0.02:
                await asyncio.sleep(self.rng.uniform(0.0, 0.3))
            writer.write(data)
            await writer.drain()


@pytest.mark.parametrize("method", ["fedbuff", "scaffold", "dlsgd-hetero"])
def test_chaos(method: str, tmp_path: Path) -> None:
    size = {"fedbuff": {"buffer_size": 3}, "scaffold": {"n": 3}, "dlsgd-hetero": {"n": 2}}[method]
    table = digits(
        {"name": method, "local_steps": 3, "client_lr": 0.05, **size}, 6, until={"virtual_seconds": CHAOS_SECONDS / 3},
        evaluate={"every_commits": 50},
    )  # fmt: skip
    rng, kills = random.Random(0), Counter[str]()
    servers = 20 // 3 + 1
    with world(tmp_path, table) as live:
        proxy = Proxy(int(live.address.rpartition(":")[2]), 1)
        proxy.start()
        proxy.ready.wait()
        live.serve()
        generations = Counter[int]()

        def join(client: int) -> None:
            generations[client] += 1
            given = {"keys": str(live.keys), "name": f"client-{client}", "state": tmp_path / f"state-{client}"}
            seed = 100 * client + generations[client]
            name = f"client-{client}"
            address = f"127.0.0.1:{proxy.port}"
            live.clients[client] = live.begin(name, rough_main, address, given, str(tmp_path / f"heard-{client}"), seed)

        for client in range(6):
            join(client)
        live.until(lambda: live.commits() > 0)
        began = time.monotonic()
        moments = sorted(rng.uniform(0.05, 0.85) * CHAOS_SECONDS / 3 for _ in range(servers))
        while live.server.is_alive():
            time.sleep(rng.uniform(0.2, 1.5))
            if moments and time.monotonic() - began > moments[0]:
                moments.pop(0)
                live.kill(live.server)
                kills["server"] += 1
                time.sleep(rng.uniform(0.0, 2.0))
                live.serve()
            elif rng.random() < 0.15:
                client = rng.randrange(6)
                if live.clients[client].is_alive():
                    live.kill(live.clients[client])
                    kills["client"] += 1
                join(client)
            for client, process in live.clients.items():
                if not process.is_alive() and live.server.is_alive():
                    join(client)
            assert time.monotonic() - began < CHAOS_SECONDS / 3 + 120, "the run does not end"
        result = live.result()
        assert "ok" in result, (result, live.errors())
        rows = read_trace(live.out)
        arrived = [record[:2] for _, record in rows if isinstance(record, Arrived)]
        used = [job for _, record in rows if isinstance(record, Commit) for job in dict.fromkeys(record.jobs)]
        heard = {
            tuple(map(int, line.split())) for file in tmp_path.glob("heard-*") for line in file.read_text().splitlines()
        }
        last = max(now for now, record in rows)
        found = verify(live.out)
        lost = acknowledged_and_gone(heard, arrived, live)
        counted = {"arrived": len(arrived), "acknowledged": len(heard), "used": len(used), "cut": proxy.cuts}
        print(
            f"\n{method}: {len(rows)} rows to {last:.0f} s; {counted}; killed {dict(kills)}; {result['ok']['refused']}"
        )
        print(f"epochs {result['ok']['live']['epochs']}; {found}")
        assert len(set(arrived)) == len(arrived)
        assert len(set(used)) == len(used)
        assert set(used) <= set(arrived)
        assert not lost
        assert found.within


def acknowledged_and_gone(heard: set[Any], arrived: list[Any], live: World) -> set[Any]:
    """Acknowledged updates that the run does not have; the trace ends at the last commit, some wait after it."""
    tail = json.loads((live.out / "result.json").read_text())["live"]["waiting"]
    return heard - set(arrived) - {tuple(job) for job in tail}


# ---- 4: load ------------------------------------------------------------------------------------
HIDDEN = 7333  # digits: 64 -> 7333 -> 10 is 2.2 MB


def loaded(clients: int, updates: int) -> dict[str, Any]:
    table = digits({"name": "fedbuff", "buffer_size": 10, "local_steps": 1, "client_lr": 0.1}, clients)
    task = {"name": "digits", "clients": clients, "model": {"name": "mlp", "hidden": HIDDEN}}
    return table | {"task": task, "until": {"commits": updates // 10}, "evaluate": {"every_commits": 1000}}


def memory(pid: int) -> int:
    """Resident KiB of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def cpu(pid: int) -> float:
    """Seconds of processor time of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_load(tmp_path: Path) -> None:
    table = loaded(200, LOAD_UPDATES)
    size = 4 * (64 * HIDDEN + HIDDEN + 10 * HIDDEN + 10)
    baseline = copying(tmp_path, size, 60)
    with world(tmp_path, table, lease=120.0, heartbeat=30.0, limits={"rate": 6000}) as live:
        live.serve()
        names = [f"client-{number}" for number in range(200)]
        began = time.monotonic()
        helpers = [
            live.begin(f"puppets-{part}", puppets_main, live.address, str(live.keys), names[part::2], size,
                       str(tmp_path / f"progress-{part}")) for part in range(2)
        ]  # fmt: skip
        seen: list[tuple[float, int, int, float]] = []
        while live.server.is_alive():
            time.sleep(1.0)
            with suppress(OSError, ValueError):
                done = sum(
                    json.loads((tmp_path / f"progress-{part}").read_text()).get("accepted", 0) for part in range(2)
                )
                seen.append((time.monotonic() - began, done, memory(live.server.pid), cpu(live.server.pid)))
        result = live.result()
        assert "ok" in result, result
        for helper in helpers:
            helper.join()
    middle = [one for one in seen if one[1] > 0.1 * LOAD_UPDATES]
    (t0, n0, _, c0), (t1, n1, _, c1) = middle[0], middle[-1]
    later = [m for _, n, m, _ in middle if n > 0.5 * LOAD_UPDATES]  # by then every client has had a model in flight
    m0, most = later[0], max(later)
    each = (t1 - t0) / (n1 - n0)
    spent = 1000 * (c1 - c0) / (n1 - n0)
    print(f"\n{n1} updates of {size:,} bytes: {1 / each:.1f}/s, {1000 * each:.1f} ms each, server CPU {spent:.1f} ms")
    quarters = [next(m for _, n, m, _ in seen if n >= part * n1 / 4) >> 10 for part in (1, 2, 3, 4)]
    print(f"memory at each quarter {quarters} MiB, from half on at most {most >> 10}; the same bytes over one TLS "
          f"connection, written and synced: {1000 * baseline:.1f} ms; ratio {each / baseline:.2f}")  # fmt: skip
    assert most < m0 * 1.25 + 100_000
    assert each < 1.5 * baseline


def copying(folder: Path, size: int, times: int) -> float:
    """Seconds to send so many bytes there and back over one TLS connection, and to write and sync them."""
    certificates.make(folder / "copy")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "copy/server.pem", folder / "copy/server.key")
    other = ssl.create_default_context(cafile=str(folder / "copy/ca.pem"))
    listener = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        plain, _ = listener.accept()
        with context.wrap_socket(plain, server_side=True) as there:
            for _ in range(times):
                data = receive(there, size)
                with (folder / "copied").open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                there.sendall(data)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    data = os.urandom(size)
    with other.wrap_socket(socket.create_connection(listener.getsockname()), server_hostname="localhost") as here:
        began = time.monotonic()
        for _ in range(times):
            here.sendall(data)
            receive(here, size)
        took = (time.monotonic() - began) / times
    thread.join()
    listener.close()
    return took


def receive(connection: ssl.SSLSocket, size: int) -> bytearray:
    buffer, view, got = bytearray(size), None, 0
    view = memoryview(buffer)
    while got < size:
        got += connection.recv_into(view[got:], size - got)
    return buffer


def test_a_thousand_idle_clients(tmp_path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    table = digits({"name": "fedbuff", "buffer_size": 10, "local_steps": 1, "client_lr": 0.1}, 1001)
    table["task"]["split"] = "iid"
    with world(tmp_path, table, lease=600.0, heartbeat=60.0) as live:
        live.serve()
        empty = memory(live.server.pid)
        names = [f"client-{number}" for number in range(1000)]
        for part in range(4):
            live.begin(f"puppets-{part}", puppets_main, live.address, str(live.keys), names[part::4], 1,
                       str(tmp_path / f"progress-{part}"))  # fmt: skip

        def connected() -> int:
            with suppress(OSError, ValueError):
                files = [json.loads((tmp_path / f"progress-{part}").read_text()) for part in range(4)]
                return sum(each.get("connected", 0) for each in files)
            return 0

        live.until(lambda: connected() == 1000, "for 1000 clients")
        time.sleep(5.0)
        before = cpu(live.server.pid)
        time.sleep(10.0)
        print(f"\n1000 idle clients: {(memory(live.server.pid) - empty) >> 10} MiB more, "
              f"{(cpu(live.server.pid) - before) / 10:.1%} of a core")  # fmt: skip
        assert live.server.is_alive()


def test_sixteen_devices_gossip(tmp_path: Path) -> None:
    fleet = {"name": "hlsgd", "clusters": {"count": 4, "graph": "ring"}}
    method = {"name": "hl-sgd", "local_steps": 4, "gossip_every": 2, "client_lr": 0.1, "p": 0.5}
    with world(tmp_path, digits(method, 16, fleet=fleet, until={"commits": 10})) as live:
        live.serve()
        live.join_all(listen="127.0.0.1:0")
        result = live.result()["ok"]
        found = verify(live.out)
    print(f"\n16 devices: 10 commits in {result['virtual_seconds']:.1f} s; {found}")
    assert found.within
