"""Three asynchronous schedules written a second time, slowly and plainly, as an oracle for the virtual clock.

No heap and no records: every client carries the times of the things it has under way, and time moves by looking
through all of them for the smallest. `d`, `c`, `u` are the seconds to download, compute and upload: one number per
client, or a function of (client, job); where versions are broadcast `d` is one number per client, whatever the version.
Transfers do not slow one another and the server takes no time. No two things that touch happen at the same moment:
the order among ties is not defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Seconds = Sequence[float] | Callable[[int, int], float]
Update = tuple[int, int, int]  # client, job, version it started from
Commits = list[tuple[float, list[Update]]]
Begun = list[tuple[float, int, int, int]]  # time, client, job, version


def seconds(table: Seconds, client: int, number: int) -> float:
    return table(client, number) if callable(table) else table[client]


# ---- FedBuff: a client is always in exactly one of three phases ---------------------------------
def fedbuff(n_clients: int, d: Seconds, c: Seconds, u: Seconds, buffer: int, commits: int) -> tuple[Commits, Begun]:
    """FedBuff, Algorithms 1 and 2: every client downloads, computes and uploads in turn; `buffer` arrivals commit."""
    phase = ["download"] * n_clients
    until = [seconds(d, i, 0) for i in range(n_clients)]
    job = [0] * n_clients
    version = [0] * n_clients  # the one that client i is downloading or working from
    newest, held, made, begun = 0, [], [], []
    while len(made) < commits:
        i = min(range(n_clients), key=lambda k: until[k])
        now = until[i]
        if phase[i] == "download":
            begun.append((now, i, job[i], version[i]))
            phase[i], until[i] = "compute", now + seconds(c, i, job[i])
        elif phase[i] == "compute":
            phase[i], until[i] = "upload", now + seconds(u, i, job[i])
        else:
            held.append((i, job[i], version[i]))
            if len(held) == buffer:
                made.append((now, held))
                newest, held = newest + 1, []
            job[i] += 1
            version[i] = newest
            phase[i], until[i] = "download", now + seconds(d, i, job[i])
    return made, begun


# ---- DLSGD: a client may download, compute and upload at the same time --------------------------
@dataclass
class Client:
    downloads: list[tuple[float, int]] = field(default_factory=list)  # (when it is here, version)
    received: int = -1  # the receive buffer: the newest version that is here
    trained: int = -1  # the version of the last job begun
    job: int = -1  # the last job begun
    until: float | None = None  # when that job is done; None when not computing
    uploads: list[tuple[float, int, int]] = field(default_factory=list)  # (when it is there, job, version)
    unsent: tuple[int, int] | None = None  # the send buffer: job, version
    wanted: bool = False  # drawn, and has not sent yet


def soonest(clients: list[Client]) -> tuple[float, int, str]:
    """The next thing to happen on any client: when, where and what."""
    best: tuple[float, int, str] | None = None
    for i, client in enumerate(clients):
        coming = [(when, i, "received") for when, _ in client.downloads]
        coming += [(when, i, "arrived") for when, _, _ in client.uploads]
        if client.until is not None:
            coming.append((client.until, i, "computed"))
        for thing in coming:
            if best is None or thing[0] < best[0]:
                best = thing
    assert best is not None, "every client is idle and nothing is under way"
    return best


def broadcast(clients: list[Client], d: Sequence[float], version: int, now: float) -> None:
    for i, client in enumerate(clients):
        client.downloads.append((now + d[i], version))


def receive(client: Client, now: float) -> None:
    """Take out of the download list what is here now; an older version never replaces a newer one."""
    here = [version for when, version in client.downloads if when <= now]
    client.downloads = [(when, version) for when, version in client.downloads if when > now]
    client.received = max([client.received, *here])


def begin_if_free(client: Client, i: int, c: Seconds, now: float, begun: Begun) -> None:
    if client.until is None and client.received > client.trained:
        client.job += 1
        client.trained = client.received
        client.until = now + seconds(c, i, client.job)
        begun.append((now, i, client.job, client.trained))


def take_arrival(client: Client, now: float) -> tuple[int, int]:
    (there,) = [upload for upload in client.uploads if upload[0] <= now]
    client.uploads.remove(there)
    return there[1], there[2]


def dlsgd_homo(
    n_clients: int, d: Sequence[float], c: Seconds, u: Seconds, n: int, commits: int
) -> tuple[Commits, Begun]:
    """DLSGD, Algorithm 1: each version goes to every receive buffer; every `n`-th arrival commits."""
    clients = [Client() for _ in range(n_clients)]
    newest, held, made, begun = 0, [], [], []
    broadcast(clients, d, newest, 0)
    while len(made) < commits:
        now, i, what = soonest(clients)
        client = clients[i]
        if what == "received":
            receive(client, now)
            begin_if_free(client, i, c, now, begun)
        elif what == "computed":
            client.until = None
            client.uploads.append((now + seconds(u, i, client.job), client.job, client.trained))
            begin_if_free(client, i, c, now, begun)
        else:
            held.append((i, *take_arrival(client, now)))
            if len(held) == n:
                made.append((now, held))
                newest, held = newest + 1, []
                broadcast(clients, d, newest, now)
    return made, begun


def send(client: Client, i: int, u: Seconds, now: float) -> None:
    """Empty the send buffer towards the server, if it is wanted and there is something in it."""
    if client.wanted and client.unsent is not None:
        job, version = client.unsent
        client.uploads.append((now + seconds(u, i, job), job, version))
        client.wanted, client.unsent = False, None


def dlsgd_hetero(
    n_clients: int, d: Sequence[float], c: Seconds, u: Seconds, draws: Sequence[Sequence[int]], commits: int
) -> tuple[Commits, Begun, list[tuple[float, int, int]]]:
    """DLSGD, Algorithm 2, with the draws given: round t waits for the clients of `draws[t]`, each as often as drawn.

    The third list has the jobs that nobody will ever use: (time of overwriting, client, job).
    """
    clients = [Client() for _ in range(n_clients)]
    made, begun, lost = [], [], []
    broadcast(clients, d, 0, 0)
    for i in draws[0]:
        clients[i].wanted = True  # all send buffers are empty at the start
    held: list[Update] = []
    while len(made) < commits:
        now, i, what = soonest(clients)
        client = clients[i]
        if what == "received":
            receive(client, now)
            begin_if_free(client, i, c, now, begun)
        elif what == "computed":
            client.until = None
            if client.unsent is not None:
                lost.append((now, i, client.unsent[0]))
            client.unsent = (client.job, client.trained)
            send(client, i, u, now)
            begin_if_free(client, i, c, now, begun)
        else:
            drawn = draws[len(made)]
            held += [(i, *take_arrival(client, now))] * list(drawn).count(i)
            if len(held) < len(drawn):
                continue
            made.append((now, held))
            held = []
            broadcast(clients, d, len(made), now)
            if len(made) < commits:
                for k in set(draws[len(made)]):
                    clients[k].wanted = True
                    send(clients[k], k, u, now)
    return made, begun, lost
