"""What the schedule plane says: commands (server to clients) and events (clients to server).

Frozen, small, standard library only. A record carries no time; drivers pass `(time, record)` pairs.
A job is named by `(client, job)`, where `job` counts the jobs that this client has begun.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

JobName: TypeAlias = "tuple[int, int]"

TRIAL = 32  # bits of a version; above them stands the number of the trial, where several are computed together
VERSION = (1 << TRIAL) - 1


# ---- commands -----------------------------------------------------------------------------------
class Start(NamedTuple):
    """Send `version` to one client, which works on it for `steps` local steps; 0: for as many as it will.

    A client that is still busy keeps the newest order in its receive buffer.
    """

    client: int
    version: int
    steps: int


class Offer(NamedTuple):
    """Broadcast `version` into every client's receive buffer; a client that is free begins on it.

    An offer that a newer one overtakes is overwritten, and a client never trains twice from one version.
    """

    version: int
    steps: int


class Fetch(NamedTuple):
    """Ask one client for its send buffer; it answers at once, or as soon as the buffer is filled."""

    client: int


class Commit(NamedTuple):
    """Turn these updates (a multiset of jobs) into the next version."""

    jobs: tuple[JobName, ...]


class Drop(NamedTuple):
    """Tell one client to give up its job; nothing of it will be used."""

    client: int


class WakeAt(NamedTuple):
    """Ask the driver for a `Woke(tag)` at this time."""

    time: float
    tag: int


# ---- events -------------------------------------------------------------------------------------
class Begun(NamedTuple):
    """A client has the model and begins to compute.

    `steps_before` is the sum of the local steps of this client's earlier jobs that it finished. A job that was lost
    while it was computed does not count.
    """

    client: int
    job: int
    version: int
    steps: int
    steps_before: int = 0


class Finished(NamedTuple):
    """A client has done its local steps; the update is in its send buffer or on its way."""

    client: int
    job: int


class Overwritten(NamedTuple):
    """A finished update that left the send buffer for a newer one, or a job that was given up: never used."""

    client: int
    job: int


class Arrived(NamedTuple):
    """An update has reached the server."""

    client: int
    job: int
    version: int
    steps: int


class Left(NamedTuple):
    """A client is gone, with whatever it was doing."""

    client: int


class Joined(NamedTuple):
    """A client is there (again) and idle."""

    client: int


class Woke(NamedTuple):
    """The time of a `WakeAt` has come."""

    tag: int


Command: TypeAlias = Start | Offer | Fetch | Commit | Drop | WakeAt
Event: TypeAlias = Begun | Finished | Overwritten | Arrived | Left | Joined | Woke
Record: TypeAlias = Command | Event
Row: TypeAlias = "tuple[float, Record]"

COMMANDS = (Start, Offer, Fetch, Commit, Drop, WakeAt)
EVENTS = (Begun, Finished, Overwritten, Arrived, Left, Joined, Woke)
HEARD = (Arrived, Left, Joined, Woke)  # the events a policy is told; the others happen on the clients
