"""One client as the clock sees it: how long things take there, and what it has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from offbeat.records import Begun


class Durations(Protocol):
    """What the clock asks a fleet; seconds, keyed by client and job, so that the order of asking is no matter."""

    @property
    def clients(self) -> int: ...
    @property
    def download_bound(self) -> float:
        """No download takes longer."""

    def download(self, client: int, job: int) -> float: ...
    def compute(self, client: int, job: int, steps: int) -> float: ...
    def upload(self, client: int, job: int) -> float: ...
    def fails(self, client: int, job: int) -> float | None:
        """The share of the computing after which the job is lost, or None."""

    def presence(self, client: int) -> Iterator[tuple[float, bool]] | None:
        """Changes of presence as (time, there), the first at time 0; None: always there."""


class Device:
    """One client's state. Only clients that were ever given work have one."""

    __slots__ = ("asked", "busy", "delivered", "inbox", "jobs", "order", "outbox", "seen", "token")

    def __init__(self) -> None:
        self.jobs = 0  # begun so far; the next job's number
        self.seen = -1  # the newest version it trained from
        self.delivered = -1  # the newest version whose update has reached the server
        self.busy: Begun | None = None  # the job it computes (or, without overlap, transfers)
        self.order = False  # a download is on its way
        self.inbox: tuple[int, int] | None = None  # receive buffer: (version, steps)
        self.outbox: Begun | None = None  # send buffer
        self.asked = False  # the server waits for the send buffer
        self.token = 0  # raised when the client's work is cancelled; older heap entries are void
