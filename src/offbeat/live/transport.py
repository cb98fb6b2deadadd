"""gRPC with mutual TLS: one stream of frames each way for a client, and one for each exchange of neighbours.

The methods move bytes; what they mean stands in `wire.py`. Who the other side is, is what its certificate says.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a failed handshake is for the log, not for the terminal

import grpc
from grpc import aio

from offbeat.errors import ConfigError
from offbeat.live import certificates
from offbeat.live.wire import FRAME_BYTES

SERVICE = "offbeat.Live"
SESSION, NEIGHBOUR = "Session", "Neighbour"
Stream = Callable[[Any, "aio.ServicerContext[Any, Any]"], Awaitable[None]]

LIMITS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", FRAME_BYTES),
    ("grpc.max_send_message_length", FRAME_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_retries", 0),
]
SERVER = [*LIMITS, ("grpc.http2.min_ping_interval_without_data_ms", 10_000), ("grpc.so_reuseport", 0)]


@dataclass(frozen=True)
class Keys:
    """The files by which one side shows who it is."""

    folder: Path
    name: str

    @property
    def chain(self) -> bytes:
        return certificates.text(self.folder / f"{self.name}.pem")

    @property
    def secret(self) -> bytes:
        return certificates.secret(self.folder / f"{self.name}.key")

    @property
    def ca(self) -> bytes:
        return certificates.text(self.folder / "ca.pem")

    def require_current(self) -> None:
        """Refuses certificates that do not count now."""
        for name in ("ca", self.name):
            certificates.require_current(self.folder / f"{name}.pem")


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, by its certificate; without certificates only an address."""

    name: str | None
    serial: int
    until: datetime | None
    address: str


def loopback(address: str) -> bool:
    """Whether nobody outside this machine can come by an address `host:port`."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_address(address: str, keys: Keys | None) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError([f"address '{address}'; write host:port, such as 127.0.0.1:7070 or [::1]:7070"])
    if keys is None and not loopback(address):
        raise ConfigError(
            [
                f"address '{address}' can be reached from other machines, and plain text is for a loopback alone; "
                "give certificates (--keys), or listen on 127.0.0.1"
            ]
        )


async def listen(
    address: str, keys: Keys | None, methods: Mapping[str, Stream], streams: int
) -> tuple[aio.Server, int]:
    """A server that takes streams of frames; and the port that it got."""
    require_address(address, keys)
    server = aio.server(options=SERVER, maximum_concurrent_rpcs=streams)
    handlers = {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        if keys is None:
            port = server.add_insecure_port(address)
        else:
            keys.require_current()
            pair = [(keys.secret, keys.chain)]
            credentials = grpc.ssl_server_credentials(pair, keys.ca, require_client_auth=True)
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ConfigError([f"address '{address}' cannot be listened on: is another server there?"]) from None
    await server.start()
    return server, port


def dial(address: str, keys: Keys | None, expected: str | None = None) -> aio.Channel:
    """A channel; `expected` is the name in the other side's certificate, where it is not that of its host."""
    require_address(address, keys)
    options = [*LIMITS, *([("grpc.ssl_target_name_override", expected)] if expected else [])]
    options += [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 5000)]
    if keys is None:
        return aio.insecure_channel(address, options=options)
    keys.require_current()
    return aio.secure_channel(address, grpc.ssl_channel_credentials(keys.ca, keys.secret, keys.chain), options=options)


def call(channel: aio.Channel, method: str = SESSION) -> Any:
    """An open stream of frames."""
    return channel.stream_stream(f"/{SERVICE}/{method}")()


def peer_of(context: Any) -> Peer:
    """Who has opened a stream."""
    address = str(context.peer())
    certificate = context.auth_context().get("x509_pem_cert")
    if not certificate:
        return Peer(None, 0, None, address)
    name, serial, until = certificates.named(certificate[0])
    return Peer(name, serial, until, address)


def ended(frame: Any) -> bool:
    """Whether the other side has said its last word."""
    return frame is aio.EOF
