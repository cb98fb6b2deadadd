"""Operations: structured logs, `/health` and `/metrics` over HTTP, a view in the terminal. They only look."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from rich.console import Console
from rich.live import Live
from rich.table import Table

from offbeat.errors import ConfigError, OffbeatError
from offbeat.live.transport import loopback

if TYPE_CHECKING:
    from offbeat.live.live_server import LiveServer

REQUEST = 8192  # bytes of an HTTP request that are read
HTTP_SECONDS = 5.0


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": record.created,
            "level": record.levelname.lower(),
            "from": record.name,
            "event": record.getMessage(),
        }
        return json.dumps({**said, **getattr(record, "facts", {})}, default=str)


def start_log(file: Path | None) -> None:
    """Structured logs into a file, or onto standard error."""
    try:
        handler: logging.Handler = logging.StreamHandler() if file is None else logging.FileHandler(file)
    except OSError as error:
        raise ConfigError([f"--log {file} cannot be written: {error.strerror}"]) from None
    handler.setFormatter(JsonLines())
    root = logging.getLogger("offbeat")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if file is not None else logging.WARNING)
    root.propagate = False


class Collector:
    """The server's health as Prometheus reads it."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server

    def collect(self) -> Iterator[Any]:
        health = self.server.health()
        gauges = {
            "version": ("versions of the model", health["version"]),
            "clients_connected": ("clients that are connected and ready", health["clients"]["connected"]),
            "clients_cut_off": ("clients within their lease", health["clients"]["cut_off"]),
            "updates_waiting": ("updates that wait for their commit", health["updates"]["waiting"]),
            "run_seconds": ("seconds since the run began", health["seconds"]),
            "epoch": ("starts of the server", health["epoch"]),
        }
        for name in ("accuracy", "loss"):
            if health["metrics"] and health["metrics"][name] is not None:
                gauges[name] = (f"{name} at the last look", health["metrics"][name])
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"offbeat_{name}", text, value=value)
        counters = {
            "updates_accepted": ("updates on the disk", health["updates"]["accepted"]),
            "bytes_up": ("bytes that came in", health["bytes"]["up"]),
            "bytes_down": ("bytes that went out", health["bytes"]["down"]),
            "malformed": ("frames that were no frames", health["malformed"]),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"offbeat_{name}", text, value=value)
        for name, table, label in (
            ("refused", health["refused"], "reason"),
            ("turned_away", health["turned_away"], "reason"),
        ):
            family = CounterMetricFamily(f"offbeat_{name}", f"{name} by reason", labels=[label])
            for reason, many in table.items():
                family.add_metric([reason], many)
            yield family


class Operations:
    """What an operator sees of a server, from when it listens until it ends."""

    def __init__(self, address: str | None, beyond: bool = False, view: bool = False) -> None:
        if address is not None:
            host, colon, port = address.rpartition(":")
            if not colon or not host or not port.isdigit():
                raise ConfigError([f"--metrics {address}; write host:port, such as 127.0.0.1:9090"])
            if not loopback(address) and not beyond:
                raise ConfigError(
                    [f"--metrics {address} can be reached from other machines; give --metrics-open if that is meant"]
                )
        self.address, self.view = address, view
        self.server: LiveServer | None = None
        self.registry = CollectorRegistry()
        self.live: Live | None = None
        self.port = 0
        self.tasks: list[asyncio.Task[None]] = []

    def watch(self, server: LiveServer) -> None:
        """Called in the server's loop when it listens."""
        self.server = server
        self.registry.register(Collector(server))
        if self.address is not None:
            self.tasks.append(asyncio.ensure_future(self.listen()))
        if self.view:
            self.live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self.live.start()
            self.tasks.append(asyncio.ensure_future(self.show()))

    async def listen(self) -> None:
        assert self.address is not None
        host, _, port = self.address.rpartition(":")
        try:
            web = await asyncio.start_server(self.answer, host.strip("[]"), int(port), limit=REQUEST)
        except OSError as error:
            raise OffbeatError(f"--metrics {self.address} cannot be listened on: {error.strerror}") from None
        self.port = web.sockets[0].getsockname()[1]
        async with web:
            await web.serve_forever()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), HTTP_SECONDS)
            words = line.decode("latin-1").split()
            status, kind, body = self.page(words[1] if len(words) > 1 and words[0] == "GET" else "")
            head = (
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await asyncio.wait_for(writer.drain(), HTTP_SECONDS)
        except (OSError, ValueError, asyncio.TimeoutError):
            pass  # whoever asked so badly gets no answer
        finally:
            writer.close()

    def page(self, path: str) -> tuple[str, str, bytes]:
        assert self.server is not None
        if path == "/health":
            health = self.server.health()
            return (
                "200 OK" if health["ok"] else "503 Service Unavailable",
                "application/json",
                json.dumps(health).encode(),
            )
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4", generate_latest(self.registry)
        return "404 Not Found", "text/plain", b"there are /health and /metrics\n"

    async def show(self) -> None:
        while True:
            if self.live is not None and self.server is not None:
                self.live.update(view(self.server.health()), refresh=True)
            await asyncio.sleep(0.5)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()


def view(health: dict[str, Any]) -> Table:
    """The live view: one table."""
    table = Table(title=f"offbeat serve: {health['state']}, epoch {health['epoch']}", show_header=False)
    clients, last = health["clients"], health["metrics"] or {}
    rows = {
        "clients": f"{clients['connected']} of {clients['of']} connected, {clients['cut_off']} cut off",
        "run": f"{time.strftime('%H:%M:%S', time.gmtime(health['seconds']))}, version {health['version']}",
        "updates": f"{health['updates']['accepted']} taken, {health['updates']['waiting']} wait for a commit",
        "refused": ", ".join(f"{many} {name}" for name, many in health["refused"].items() if many) or "none",
        "bytes": f"{health['bytes']['up']:,} up, {health['bytes']['down']:,} down",
        "accuracy": f"{last['accuracy']:.4f}" if last.get("accuracy") is not None else f"loss {last.get('loss')}",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table
