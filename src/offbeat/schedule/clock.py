"""The virtual clock: an agenda that drives a policy over a fleet, without a tensor in sight.

It yields `(time, record)` rows: every command, every event, in order. Durations are drawn by the fleet, never
measured. The agenda counts in whole ticks (`schedule/ticks.py`), rows and policies in seconds.
What a client does between them follows from two flags of the policy:

* `overlaps`: a client begins its next job when it has computed the last, while downloads and uploads run beside;
  otherwise it downloads, trains and uploads in turn;
* `holds`: finished updates stay in the send buffer (of one, overwritten) until the server fetches them.

Links are not shared: each transfer takes latency + bytes / bandwidth, however many run at once (as in the papers).
What a client has in hand stands in columns, one entry per client: a million objects would be slow to make and large.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TypeAlias

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
from offbeat.schedule.agenda import Agenda, Entry
from offbeat.schedule.commands import require_fit
from offbeat.schedule.device import Durations
from offbeat.schedule.guard import nothing_refused
from offbeat.schedule.ticks import NEAREST, PER_SECOND, InTicks, SteadyInTicks, ticks

BATCH = 100  # rows are handed out when so many are there; a reader who stops early has waited for no more
record = tuple.__new__  # record(Begun, (...)) is Begun(...) at half the cost
Work: TypeAlias = tuple[int, int, int, int, int]  # as in `Begun`: a plain tuple is quicker to take apart


class VirtualClock:
    """Iterate to get the rows. Stops when nothing can happen any more; a run stops earlier by not asking on."""

    __slots__ = (
        "agenda", "asked", "away", "bound", "busy", "changes", "coming", "conductor", "delivered", "done", "durations",
        "floor", "full", "holds", "in_turn", "inbox", "jobs", "kept", "mark", "newest", "now", "offered", "offers",
        "outbox", "overlaps", "own", "policy", "put", "rising", "rows", "say", "seen", "takes", "tick", "tokens",
        "waiting",
    )  # fmt: skip

    def __init__(self, policy: Policy, durations: Durations, rng: random.Random) -> None:
        clients = durations.clients
        self.policy = policy
        self.holds, self.overlaps = policy.holds, policy.overlaps
        self.in_turn = not self.holds and not self.overlaps  # what is computed is sent at once, and nothing else begins
        self.durations = durations
        columns = durations.steady
        self.takes = InTicks(durations) if columns is None else SteadyInTicks(columns)
        self.bound = ticks(durations.download_bound)
        self.own = durations.own_steps
        self.conductor: Conductor = policy.conductor(clients, rng)
        self.agenda = Agenda()
        self.put = self.agenda.put
        self.now = 0.0  # in seconds ...
        self.tick = 0.0  # ... and in ticks
        self.rows: list[Row] = []  # not yet handed out
        self.say = self.rows.append
        self.full = BATCH
        self.newest = 0  # the newest version
        self.floor = 0  # no job that begins from now on starts from an older version
        self.rising = 0  # the floor behind the last commit
        self.mark = 0  # where in `rows` that commit stands
        self.kept = 8  # versions above the floor when it was last looked for
        # What each client has in hand.
        self.jobs = [0] * clients  # begun so far; the next job's number
        self.done = [0] * clients  # local steps of the jobs that it has finished
        self.seen = [-1] * clients  # the newest version it trained from
        self.delivered = [-1] * clients  # the newest version whose update has reached the server
        self.tokens: Counter[int] = Counter()  # raised when a client's work is cancelled; older entries are void
        self.busy: list[Work | None] = [None] * clients  # the job it computes (or, without overlap, transfers)
        self.coming: dict[int, int] = {}  # the version of an offer on its way
        self.inbox: dict[int, tuple[int, int, int]] = {}  # receive buffer: (client, version, steps)
        self.outbox: list[Work | None] = [None] * clients if self.holds else []  # send buffer
        self.asked: set[int] = set()  # the server waits for the send buffer
        self.away: set[int] = set()
        self.changes: dict[int, Iterator[tuple[float, bool]]] = {}
        self.offered: list[float] = []  # tick of each offer ...
        self.offers: list[Offer] = []  # ... and the offer
        self.waiting: dict[int, None] = {}  # clients with nothing to do until the next offer, in order

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self.batches())

    @property
    def refused(self) -> dict[str, int]:
        return nothing_refused()  # what is cancelled never arrives here, and nothing arrives twice

    def batches(self) -> Iterator[list[Row]]:
        self.look_who_is_there()
        self.obey(self.conductor.begin(0.0, self.present()))
        yield from self.hand_out()
        try:
            yield from self.turns() if self.in_turn else self.events()
        except Exception:
            yield from self.hand_out()  # what came before; whoever asks on meets the error
            raise
        yield from self.hand_out()

    def events(self) -> Iterator[list[Row]]:
        rows = self.rows
        for tick, action, what, token in self.agenda:
            self.now, self.tick = tick / PER_SECOND, tick
            action(self, what, token)
            if len(rows) > self.full:
                yield from self.hand_out()

    def turns(self) -> Iterator[list[Row]]:
        """`events` for clients that download, train and upload in turn. What comes out of `on_delivery`, `on_computed`,
        `on_arrival` and `obey` for these stands in one loop, because a million clients pay for every call."""
        rows, agenda, later, put = self.rows, self.agenda, self.agenda.later, self.put
        jobs, seen, delivered, busy, done = self.jobs, self.seen, self.delivered, self.busy, self.done
        tokens, token_of, away = self.tokens, self.tokens.get, self.away
        offers, inbox, clients = self.offers, self.inbox, len(self.jobs)
        takes, arrived, own = self.takes, self.conductor.arrived, self.own
        download, compute, failure, upload = takes.download, takes.compute, takes.failure, takes.upload
        fixed = isinstance(takes, SteadyInTicks)
        down, step, up = (takes.down, takes.step, takes.up) if isinstance(takes, SteadyInTicks) else ((), (), ())
        per_second, nearest = PER_SECOND, NEAREST
        entry: Entry
        for tick, action, what, token in agenda:
            now = tick / per_second
            if action is COMPUTED:
                client, number, _, steps, before = what
                if busy[client] is not what:
                    continue  # it was cancelled
                done[client] = before + steps
                rows.append((now, record(Finished, (client, number))))
                entry = (tick + (up[client] if fixed else upload(client, number)), ARRIVAL, what, token)
            elif action is ARRIVAL:
                client, _, version, _, _ = what
                if busy[client] is not what:
                    continue
                busy[client] = None
                if version > delivered[client]:
                    delivered[client] = version
                arrival = record(Arrived, what[:4])
                rows.append((now, arrival))
                for command in arrived(now, arrival):
                    if type(command) is Start:
                        rows.append((now, command))
                        started, version, steps = command
                        if version != self.newest or steps < 0 or not 0 <= started < clients:
                            require_fit(self.policy, now, command, clients, self.newest)
                        wait = down[started] if fixed else download(started, jobs[started])
                        raised = token_of(started, 0) if tokens else 0
                        entry = (tick + wait, DELIVERY, (started, version, steps), raised)
                        if entry[0] < agenda.until:
                            put(entry)
                        else:
                            later.append(entry)
                    else:
                        self.now, self.tick = now, tick
                        self.obey([command])
                if offers or inbox:
                    self.now, self.tick = now, tick
                    self.next_work(client)
                if len(rows) > self.full:
                    yield from self.hand_out()
                continue
            elif action is DELIVERY and not (away or offers or busy[what[0]]):
                client, version, steps = what
                if tokens and token != token_of(client, 0):
                    continue
                number = jobs[client]
                jobs[client] = number + 1
                seen[client] = version
                if not steps:
                    steps = own(client, number)
                busy[client] = job = (client, number, version, steps, done[client])
                rows.append((now, record(Begun, job)))
                if fixed:
                    exact = step[client] * steps
                    entry = (tick + ((exact + nearest - nearest) or exact > 0.0), COMPUTED, job, token)
                elif (lost := failure(client, number, steps)) is None:
                    entry = (tick + compute(client, number, steps), COMPUTED, job, token)
                else:
                    entry = (tick + lost, FAILURE, client, token)
            else:
                self.now, self.tick = now, tick
                action(self, what, token)
                if len(rows) > self.full:
                    yield from self.hand_out()
                continue
            if entry[0] < agenda.until:
                put(entry)
            else:
                later.append(entry)
            if len(rows) > self.full:
                yield from self.hand_out()

    def hand_out(self) -> Iterator[list[Row]]:
        """The rows so far. Whoever reads them finds the floor that held then: it rises with the row of a commit."""
        if not self.full:
            before = self.rows[: self.mark]
            yield before
            del self.rows[: self.mark]
            self.floor, self.full = self.rising, BATCH
        yield self.rows
        self.rows.clear()

    def raises(self) -> None:
        """The last row said may raise the floor."""
        if self.full:
            self.full, self.mark = 0, len(self.rows) - 1

    # ---- commands -------------------------------------------------------------------------------
    def obey(self, commands: list[Command]) -> None:
        now, say, clients = self.now, self.say, len(self.jobs)
        for command in commands:
            say((now, command))
            if type(command) is Start:
                client, version, steps = command
                if version != self.newest or steps < 0 or not 0 <= client < clients:
                    require_fit(self.policy, now, command, clients, self.newest)
                arrives = self.tick + self.takes.download(client, self.jobs[client])
                self.put((arrives, DELIVERY, (client, version, steps), self.tokens[client]))
            elif type(command) is Fetch and 0 <= command[0] < clients:
                # A request is a few bytes and costs no time; what else happens at this instant comes before it.
                self.put((self.tick, FETCH, command[0], self.tokens[command[0]]))
            else:
                require_fit(self.policy, now, command, clients, self.newest)
                self.obey_rarer(command)

    def obey_rarer(self, command: Command) -> None:
        if type(command) is Commit:
            self.newest += 1
            self.raises()
            if not self.offers:
                self.rising += 1
        elif type(command) is Offer:
            self.raises()
            self.offer(command)
        elif type(command) is Drop:
            self.cancel(command.client)
        elif type(command) is WakeAt:
            self.put((ticks(command.time), WAKE, command.tag, 0))

    def offer(self, offer: Offer) -> None:
        self.offered.append(self.tick)
        self.offers.append(offer)
        while self.rising + 1 < len(self.offered) and self.offered[self.rising + 1] + self.bound < self.tick:
            self.rising += 1
        if len(self.offered) - self.rising > 2 * self.kept:
            self.raise_floor()
        waiting = self.present() if offer.version == 0 else self.waiting
        self.waiting = {}
        for client in waiting:
            self.next_offer(client)

    def raise_floor(self) -> None:
        """Where downloads can take very long the bound says little: see what each client can still start from.

        It begins on nothing older than what it has received by now, and nothing twice. The window has to double
        before it is looked through again.
        """
        newest = len(self.offered) - 1
        for client in self.present():
            delay = self.takes.download(client, self.jobs[client])
            received = bisect_right(self.offered, self.tick - delay) - 1
            newest = min(newest, self.coming.get(client, max(self.seen[client] + 1, received)))
        self.rising = max(self.rising, newest)
        self.kept = max(8, len(self.offered) - self.rising)

    def cancel(self, client: int) -> None:
        self.tokens[client] += 1
        for column in (self.busy, self.outbox) if self.holds else (self.busy,):
            job, column[client] = column[client], None
            if job is not None:
                self.say((self.now, Overwritten(client, job[1])))
        self.seen[client] = self.delivered[client]  # what is lost may be trained again
        self.coming.pop(client, None)
        self.inbox.pop(client, None)
        self.asked.discard(client)
        self.waiting.pop(client, None)

    # ---- what happens on a client ---------------------------------------------------------------
    def on_fetch(self, client: int, token: int) -> None:
        if token != self.tokens[client]:
            return
        self.asked.add(client)
        job = self.outbox[client] if self.holds else None
        # Without overlap a client that is downloading or computing answers with the update it is about to make.
        if job is not None and (self.overlaps or (self.busy[client] is None and client not in self.coming)):
            self.outbox[client] = None
            self.send(job, token)

    def on_delivery(self, order: tuple[int, int, int], token: int) -> None:
        client = order[0]
        if token != self.tokens[client] or client in self.away:
            return
        self.coming.pop(client, None)
        if self.busy[client] is None:
            self.compute(order, token)
        else:
            self.inbox[client] = order

    def compute(self, order: tuple[int, int, int], token: int) -> None:
        client, version, steps = order[0], order[1], order[2]
        number, tick, takes = self.jobs[client], self.tick, self.takes
        steps = steps or self.own(client, number)
        self.jobs[client] = number + 1
        self.seen[client] = version
        self.busy[client] = job = (client, number, version, steps, self.done[client])
        self.say((self.now, record(Begun, job)))
        lost = takes.failure(client, number, steps)
        if lost is None:
            self.put((tick + takes.compute(client, number, steps), COMPUTED, job, token))
        else:
            self.put((tick + lost, FAILURE, client, token))

    def on_computed(self, job: Work, token: int) -> None:
        client, number, _, steps, earlier = job
        if token != self.tokens[client]:
            return
        self.done[client] = earlier + steps
        now = self.now
        self.say((now, record(Finished, (client, number))))
        if self.in_turn:
            self.put((self.tick + self.takes.upload(client, number), ARRIVAL, job, token))
            return
        self.busy[client] = None
        if self.holds:
            before, self.outbox[client] = self.outbox[client], job
            if before is not None:
                self.say((now, record(Overwritten, (client, before[1]))))
        if not self.holds:
            self.send(job, token)
        elif client in self.asked:
            self.outbox[client] = None
            self.send(job, token)
        self.next_work(client)

    def send(self, job: Work, token: int) -> None:
        client, number, _, _, _ = job
        self.asked.discard(client)
        if not self.overlaps:
            self.busy[client] = job  # the link is the client's only occupation until the upload is in
        self.put((self.tick + self.takes.upload(client, number), ARRIVAL, job, token))

    def on_arrival(self, job: Work, token: int) -> None:
        client, number, version, _, _ = job
        if token != self.tokens[client]:
            if self.overlaps:  # an upload that ran beside computing when the client went away
                self.say((self.now, Overwritten(client, number)))
            return
        if not self.overlaps:
            self.busy[client] = None
        if version > self.delivered[client]:
            self.delivered[client] = version
        arrival = record(Arrived, job[:4])
        now = self.now
        self.say((now, arrival))
        self.obey(self.conductor.arrived(now, arrival))
        if not self.overlaps and (self.offers or self.inbox):
            self.next_work(client)

    def next_work(self, client: int) -> None:
        """A free client looks into its receive buffer: an order, or the newest offer it has not trained from."""
        if self.busy[client] is not None or client in self.coming:
            return
        if client in self.inbox:
            self.compute(self.inbox.pop(client), self.tokens[client])
        elif self.offers:
            self.next_offer(client)

    def next_offer(self, client: int) -> None:
        if client in self.coming or self.busy[client] is not None:
            return
        tick, seen, offers = self.tick, self.seen[client], self.offers
        delay = self.takes.download(client, self.jobs[client])
        if self.overlaps:  # what has come in by now, this moment included
            place = bisect_right(self.offered, tick - delay) - 1
            if place >= 0 and offers[place].version > seen:
                self.compute((client, *offers[place]), self.tokens[client])
                return
            place = seen + 1  # the next to come in, if it is on its way
        else:  # pull the newest
            place = len(offers) - 1 if offers[-1].version > seen else len(offers)
        if place == len(offers):
            self.waiting[client] = None
            return
        since = self.offered[place] if self.overlaps else tick
        self.expect(client, since + delay, offers[place])

    def expect(self, client: int, tick: float, offer: Offer) -> None:
        self.coming[client] = offer.version
        self.put((tick, DELIVERY, (client, offer.version, offer.steps), self.tokens[client]))

    # ---- presence -------------------------------------------------------------------------------
    def present(self) -> Sequence[int]:
        everyone = range(self.durations.clients)
        return [client for client in everyone if client not in self.away] if self.away else everyone

    def look_who_is_there(self) -> None:
        for client, there, until in self.durations.opening():
            if not there:
                self.away.add(client)
                self.say((0.0, Left(client)))
            if until < math.inf:
                self.put((ticks(until), CHANGE, (client, not there), 0))

    def on_failure(self, client: int, token: int) -> None:
        if token == self.tokens[client]:
            self.leave(client)
            self.join(client)

    def on_change(self, change: tuple[int, bool], _: int) -> None:
        client, there = change
        if there and client in self.away:
            self.away.discard(client)
            self.join(client)
        elif not there and client not in self.away:
            self.away.add(client)
            self.leave(client)
        self.schedule_change(client)

    def schedule_change(self, client: int) -> None:
        if client not in self.changes:  # its first change has come: the iterator goes on behind that
            presence = self.durations.presence(client)
            assert presence is not None
            self.changes[client] = islice(presence, 2, None)
        change = next(self.changes[client], None)
        if change is not None:
            time, there = change
            if ticks(time) < self.tick:
                raise OffbeatError(f"client {client}: presence changes at {time} s, before {self.now} s")
            self.put((ticks(time), CHANGE, (client, there), 0))

    def leave(self, client: int) -> None:
        self.cancel(client)
        self.say((self.now, Left(client)))
        self.obey(self.conductor.left(self.now, Left(client)))

    def join(self, client: int) -> None:
        self.say((self.now, Joined(client)))
        self.obey(self.conductor.joined(self.now, Joined(client)))
        if not self.offers or self.busy[client] is not None or client in self.coming:
            return
        offer = self.offers[-1]
        if offer.version <= self.seen[client]:
            self.waiting[client] = None
        else:  # what was broadcast while it was away must be sent again
            self.expect(client, self.tick + self.takes.download(client, self.jobs[client]), offer)

    def on_wake(self, tag: int, _: int) -> None:
        self.say((self.now, Woke(tag)))
        self.obey(self.conductor.woke(self.now, Woke(tag)))


# What an entry of the agenda says to do.
DELIVERY, COMPUTED = VirtualClock.on_delivery, VirtualClock.on_computed
ARRIVAL, FETCH, WAKE = VirtualClock.on_arrival, VirtualClock.on_fetch, VirtualClock.on_wake
FAILURE, CHANGE = VirtualClock.on_failure, VirtualClock.on_change
