"""The door of a live server: who may come in, by certificate, list and conduct."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone

from offbeat.live import certificates, transport
from offbeat.live.checks import Checks, Limits
from offbeat.live.wire import PROTOCOL, Hello, Refused


@dataclass(frozen=True)
class Options:
    """How a server listens. `allow` names the certificates of the clients, in the order of their numbers."""

    address: str = "127.0.0.1:0"
    keys: transport.Keys | None = None
    allow: tuple[str, ...] | None = None  # None: client-0, client-1, ...
    start_with: int | None = None  # clients that must be there before the run begins; None: all
    heartbeat: float = 5.0
    lease: float = 30.0
    limits: Limits = field(default_factory=Limits)

    def problems(self, clients: int) -> list[str]:
        problems = self.limits.problems()
        if self.start_with is not None and not 1 <= self.start_with <= clients:
            problems.append(f"start_with = {self.start_with}; it is between 1 and the {clients} clients of the task")
        if not 0 < self.heartbeat < self.lease:
            problems.append(
                f"heartbeat = {self.heartbeat} and lease = {self.lease} s; both are positive, and a lease is longer"
            )
        if self.allow is not None and len(self.allow) != clients:
            problems.append(f"{len(self.allow)} names of clients for a task of {clients}; give one for each, in order")
        if self.allow is not None and len(set(self.allow)) != len(self.allow):
            problems.append("a name of a client is given twice; each has one certificate of its own")
        return problems

    def names(self, clients: int) -> dict[str, int]:
        names = self.allow or tuple(f"client-{number}" for number in range(clients))
        return {name: number for number, name in enumerate(names)}


class Door:
    """Knows clients by their certificates alone."""

    def __init__(self, options: Options, clients: int, checks: Checks) -> None:
        self.options, self.clients, self.checks = options, clients, checks
        self.names = options.names(clients)
        self.turned_away: Counter[str] = Counter()  # connections, by reason
        self.revoked: set[int] = set()
        self.seen: tuple[int, int] | None = None  # the list as it was read: when it was written, and which file

    def look(self) -> None:
        """Read the list of revoked certificates when it changes."""
        if self.options.keys is None:
            return
        file = self.options.keys.folder / "revoked.pem"
        seen = (file.stat().st_mtime_ns, file.stat().st_ino) if file.exists() else None
        if seen != self.seen:
            self.revoked, self.seen = certificates.revoked(self.options.keys.folder), seen

    def problem(self, peer: transport.Peer) -> str | None:
        """What is wrong with a certificate that once was good."""
        if peer.serial in self.revoked:
            return "this certificate was revoked"
        if peer.until is not None and peer.until <= datetime.now(timezone.utc):
            return "this certificate has expired; renew it"
        return None

    def admit(self, peer: transport.Peer, first: object, connected: int) -> tuple[int, Refused | None]:
        """Which client has come; or why it is not let in."""
        client, refusal = self.look_at(peer, first, connected)
        if refusal is not None:
            self.turned_away[refusal.reason.partition(":")[0]] += 1
        return client, refusal

    def look_at(self, peer: transport.Peer, first: object, connected: int) -> tuple[int, Refused | None]:
        if not isinstance(first, Hello):
            return -1, Refused(f"malformed: a session begins with Hello, not {type(first).__name__}", True)
        if first.protocol != PROTOCOL:
            return -1, Refused(
                f"protocol: {first.protocol} there, {PROTOCOL} here; take the same version of Offbeat", True
            )
        client = first.client
        if self.options.keys is not None:
            if peer.name is None:
                return -1, Refused("no certificate: this server knows clients by their certificates", True)
            if (problem := self.problem(peer)) is not None:
                return -1, Refused(f"certificate: {problem}", True)
            client = self.names.get(peer.name, -1)
        if not 0 <= client < self.clients:
            who = f"'{peer.name}'" if peer.name is not None else f"client {client}"
            return -1, Refused(f"unknown client: {who} is not on the list of this run's {self.clients} clients", True)
        if shut := self.checks.of(client).shut_out:
            return -1, Refused(f"shut out: {shut}", True)
        if connected >= self.options.limits.connections:
            return -1, Refused("full: too many connections; come again", False)
        return client, None
