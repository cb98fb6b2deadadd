"""The virtual clock: a heap of `(time, serial, ...)` that drives a policy over a fleet, without a tensor in sight.

It yields `(time, record)` rows: every command, every event, in order. Durations are drawn by the fleet, never
measured. What a client does between them follows from two flags of the policy:

* `overlaps`: a client begins its next job when it has computed the last, while downloads and uploads run beside;
  otherwise it downloads, trains and uploads in turn;
* `holds`: finished updates stay in the send buffer (of one, overwritten) until the server fetches them.

Links are not shared: each transfer takes latency + bytes / bandwidth, however many run at once (as in the papers).
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.method import Conductor, Policy
from offbeat.records import (
    Arrived,
    Begun,
    Command,
    Commit,
    Drop,
    Fetch,
    Finished,
    Joined,
    Left,
    Offer,
    Overwritten,
    Row,
    Start,
    WakeAt,
    Woke,
)
from offbeat.schedule.device import Device, Durations

ROUNDING = 1e-12  # relative; sums of the same durations in another order differ by less


class VirtualClock:
    """Iterate to get the rows. Stops when nothing can happen any more; a run stops earlier by not asking on."""

    def __init__(self, policy: Policy, durations: Durations, rng: random.Random) -> None:
        self.policy = policy
        self.durations = durations
        self.conductor: Conductor = policy.conductor(durations.clients, rng)
        self.now = 0.0
        self.kept = 8  # versions above the floor when it was last looked for
        self.floor = 0  # no job that begins from now on starts from an older version
        self.heap: list[tuple[float, int, Any, int, int, Any]] = []
        self.serial = 0
        self.devices: dict[int, Device] = {}
        self.away: set[int] = set()
        self.changes: dict[int, Iterator[tuple[float, bool]]] = {}
        self.offered: list[float] = []  # time of each offer ...
        self.offers: list[Offer] = []  # ... and the offer
        self.waiting: dict[int, None] = {}  # clients with nothing to do until the next offer, in order
        self.rows: list[Row] = []

    def __iter__(self) -> Iterator[Row]:
        for client in range(self.durations.clients):
            changes = self.durations.presence(client)
            if changes is not None:
                self.changes[client] = changes
                if not next(changes)[1]:
                    self.away.add(client)
                    self.rows.append((0.0, Left(client)))
                self.schedule_change(client)
        present = range(self.durations.clients) if not self.away else self.present()
        self.obey(self.conductor.begin(0.0, present))
        yield from self.flush()
        heap = self.heap
        while heap:
            self.now, _, action, client, token, what = heapq.heappop(heap)
            action(client, token, what)
            if self.rows:
                yield from self.flush()

    def present(self) -> list[int]:
        return [client for client in range(self.durations.clients) if client not in self.away]

    def flush(self) -> list[Row]:
        rows, self.rows = self.rows, []
        return rows

    def at(self, time: float, action: Any, client: int, token: int = 0, what: Any = None) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (time, self.serial, action, client, token, what))

    def device(self, client: int) -> Device:
        found = self.devices.get(client)
        if found is None:
            found = self.devices[client] = Device()
        return found

    # ---- commands -------------------------------------------------------------------------------
    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            self.rows.append((self.now, command))
            if type(command) is Start:
                self.start(command)
            elif type(command) is Offer:
                self.offer(command)
            elif type(command) is Fetch:
                # A request is a few bytes and costs no time; what else happens at this instant comes before it.
                self.at(self.now, self.on_fetch, command.client, self.device(command.client).token)
            elif type(command) is Drop:
                self.cancel(command.client)
            elif type(command) is WakeAt:
                self.at(command.time, self.on_wake, -1, 0, command.tag)
            elif type(command) is Commit and not self.offers:
                self.floor += 1

    def start(self, order: Start) -> None:
        device = self.device(order.client)
        arrives = self.now + self.durations.download(order.client, device.jobs)
        self.at(arrives, self.on_delivery, order.client, device.token, (order.version, order.steps))

    def offer(self, offer: Offer) -> None:
        self.offered.append(self.now)
        self.offers.append(offer)
        bound = self.durations.download_bound
        while self.floor + 1 < len(self.offered) and self.offered[self.floor + 1] + bound < self.now:
            self.floor += 1
        if len(self.offered) - self.floor > 2 * self.kept:
            self.raise_floor()
        if offer.version == 0:
            self.waiting = dict.fromkeys(self.present())
        waiting, self.waiting = self.waiting, {}
        for client in waiting:
            self.next_offer(client)

    def raise_floor(self) -> None:
        """Where downloads can take very long the bound says little: see what each client can still start from.

        It begins on nothing older than what it has received by now, and nothing twice. The window has to double
        before it is looked through again.
        """
        newest = len(self.offered) - 1
        for client, device in self.devices.items():
            if client not in self.away:
                delay = self.durations.download(client, device.jobs)
                received = bisect_right(self.offered, self.now - delay + ROUNDING * self.now) - 1
                newest = min(newest, max(device.seen + 1, received))
        self.floor = max(self.floor, newest)
        self.kept = max(8, len(self.offered) - self.floor)

    def cancel(self, client: int) -> None:
        device = self.device(client)
        device.token += 1
        for job in (device.busy, device.outbox):
            if job is not None:
                self.rows.append((self.now, Overwritten(client, job.job)))
        device.seen = device.delivered  # what is lost may be trained again
        device.busy = device.inbox = device.outbox = None
        device.order = device.asked = False
        self.waiting.pop(client, None)

    # ---- what happens on a client ---------------------------------------------------------------
    def on_fetch(self, client: int, token: int, _: None) -> None:
        device = self.devices[client]
        if token != device.token:
            return
        device.asked = True
        # Without overlap a client that is downloading or computing answers with the update it is about to make.
        free = device.busy is None and not device.order
        if device.outbox is not None and (self.policy.overlaps or free):
            self.send(client, device)

    def on_delivery(self, client: int, token: int, order: tuple[int, int]) -> None:
        device = self.devices[client]
        if token != device.token or client in self.away:
            return
        device.order = False
        if device.busy is not None:
            device.inbox = order
            return
        self.compute(client, device, *order)

    def compute(self, client: int, device: Device, version: int, steps: int) -> None:
        job = Begun(client, device.jobs, version, steps)
        device.jobs += 1
        device.seen = version
        device.busy = job
        self.rows.append((self.now, job))
        seconds = self.durations.compute(client, job.job, steps)
        lost = self.durations.fails(client, job.job)
        if lost is None:
            self.at(self.now + seconds, self.on_computed, client, device.token, job)
        else:
            self.at(self.now + lost * seconds, self.on_failure, client, device.token)

    def on_computed(self, client: int, token: int, job: Begun) -> None:
        device = self.devices[client]
        if token != device.token:
            return
        self.rows.append((self.now, Finished(client, job.job)))
        if device.outbox is not None:
            self.rows.append((self.now, Overwritten(client, device.outbox.job)))
        device.outbox = job
        device.busy = None
        if not self.policy.holds or device.asked:
            self.send(client, device)
        self.next_work(client, device)

    def send(self, client: int, device: Device) -> None:
        job = device.outbox
        assert job is not None
        device.outbox = None
        device.asked = False
        if not self.policy.overlaps:
            device.busy = job  # the link is the client's only occupation until the upload is in
        done = self.now + self.durations.upload(client, job.job)
        self.at(done, self.on_arrival, client, device.token, job)

    def on_arrival(self, client: int, token: int, job: Begun) -> None:
        device = self.devices[client]
        if token != device.token:
            if self.policy.overlaps:  # an upload that ran beside computing when the client went away
                self.rows.append((self.now, Overwritten(client, job.job)))
            return
        if not self.policy.overlaps:
            device.busy = None
        device.delivered = max(device.delivered, job.version)
        arrival = Arrived(client, job.job, job.version, job.steps)
        self.rows.append((self.now, arrival))
        self.obey(self.conductor.arrived(self.now, arrival))
        if not self.policy.overlaps:
            self.next_work(client, device)

    def next_work(self, client: int, device: Device) -> None:
        """A free client looks into its receive buffer: an order, or the newest offer it has not trained from."""
        if device.busy is not None or device.order:
            return
        if device.inbox is not None:
            order, device.inbox = device.inbox, None
            self.compute(client, device, *order)
        elif self.offers:
            self.next_offer(client)

    def next_offer(self, client: int) -> None:
        device = self.device(client)
        if device.order or device.busy is not None:
            return
        delay = self.durations.download(client, device.jobs)
        if self.policy.overlaps:  # what has come in by now, this moment included whatever the rounding
            place = bisect_right(self.offered, self.now - delay + ROUNDING * self.now) - 1
            if place >= 0 and self.offers[place].version > device.seen:
                self.compute(client, device, self.offers[place].version, self.offers[place].steps)
                return
            place = device.seen + 1  # the next to come in, if it is on its way
        else:  # pull the newest
            place = len(self.offers) - 1 if self.offers[-1].version > device.seen else len(self.offers)
        if place == len(self.offers):
            self.waiting[client] = None
            return
        device.order = True
        since = self.offered[place] if self.policy.overlaps else self.now
        offer = self.offers[place]
        self.at(since + delay, self.on_delivery, client, device.token, (offer.version, offer.steps))

    # ---- presence -------------------------------------------------------------------------------
    def on_failure(self, client: int, token: int, _: None) -> None:
        if token == self.devices[client].token:
            self.leave(client)
            self.join(client)

    def on_change(self, client: int, _: int, there: bool) -> None:
        if there and client in self.away:
            self.away.discard(client)
            self.join(client)
        elif not there and client not in self.away:
            self.away.add(client)
            self.leave(client)
        self.schedule_change(client)

    def schedule_change(self, client: int) -> None:
        change = next(self.changes[client], None)
        if change is not None:
            if change[0] < self.now:
                raise OffbeatError(f"client {client}: presence changes at {change[0]} s, before {self.now} s")
            self.at(change[0], self.on_change, client, 0, change[1])

    def leave(self, client: int) -> None:
        self.cancel(client)
        self.rows.append((self.now, Left(client)))
        self.obey(self.conductor.left(self.now, Left(client)))

    def join(self, client: int) -> None:
        device = self.device(client)
        self.rows.append((self.now, Joined(client)))
        self.obey(self.conductor.joined(self.now, Joined(client)))
        if not self.offers or device.busy is not None or device.order:
            return
        offer = self.offers[-1]
        if offer.version <= device.seen:
            self.waiting[client] = None
        else:  # what was broadcast while it was away must be sent again
            device.order = True
            delay = self.durations.download(client, device.jobs)
            self.at(self.now + delay, self.on_delivery, client, device.token, (offer.version, offer.steps))

    def on_wake(self, _: int, __: int, tag: int) -> None:
        self.rows.append((self.now, Woke(tag)))
        self.obey(self.conductor.woke(self.now, Woke(tag)))
