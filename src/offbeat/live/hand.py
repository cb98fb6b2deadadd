"""What a client has in hand: a model to begin on, a job under way, updates that were not asked for or not answered yet.

No I/O: told what the server says, it keeps the books. They outlive connections, and end with the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from offbeat.live.wire import Drop, Void, Welcome
from offbeat.records import Begun

Finished = tuple[Begun, bytes]  # a job, and its update as it travels


def behind(begun: Begun) -> int:
    """Where the client's next job begins in its stream once this one is finished."""
    return begun.steps_before + begun.steps


class Work(NamedTuple):
    """What lies in the receive buffer."""

    version: int
    steps: int
    packet: bytearray
    since: float


class Hand:
    """The jobs of one client in one run. `holds`: updates wait until they are asked for; `overlaps`: a job may begin
    while an update is on its way."""

    def __init__(self, holds: bool, overlaps: bool) -> None:
        self.holds, self.overlaps = holds, overlaps
        self.inbox: Work | None = None
        self.current: Begun | None = None
        self.outbox: Finished | None = None  # the send buffer, where there is one
        self.asked = False
        self.unheard: dict[int, Finished] = {}  # sent, and not answered yet
        self.epochs: dict[int, int] = {}  # under which each job began
        self.seen = self.delivered = -1  # versions: trained from, and known to the server
        self.number = 0  # of the next job
        self.steps_before = 0  # of the next job: the steps of those that are finished

    def finished(self) -> Iterator[Finished]:
        """Updates that are made, and that the server is not known to have."""
        yield from self.unheard.values()
        if self.outbox is not None:
            yield self.outbox

    def held(self) -> list[list[Any]]:
        """Job, version, steps and earlier steps of each, and whether it is finished."""
        jobs = [[*begun[1:], True] for begun, _ in self.finished()]
        return jobs + ([] if self.current is None else [[*self.current[1:], False]])

    def keep(self, finished: Finished) -> None:
        """An update that an earlier process of this client left."""
        if self.holds:
            self.outbox = finished
        else:
            self.unheard[finished[0].job] = finished

    def connected(self, welcome: Welcome) -> None:
        """A server begins to speak; a job that it does not know begins under its epoch."""
        self.inbox, self.asked = None, False
        for job, *_ in self.held():
            if job not in welcome.held:
                self.epochs[job] = welcome.epoch
        self.stand(welcome.number, welcome.steps_before)

    def stand(self, number: int, steps_before: int) -> None:
        """Number and place the next job as the server does, behind the jobs in hand that it may not have on record."""
        self.number = max([number, *(job[0] + 1 for job in self.held())])
        self.steps_before = max([steps_before, *(behind(begun) for begun, _ in self.finished())])

    # ---- working --------------------------------------------------------------------------------
    def ready(self) -> bool:
        """Whether a job can begin."""
        return self.inbox is not None and (self.overlaps or not self.unheard)

    def begin(self, client: int, number: int, steps: int, epoch: int) -> tuple[Begun, Work]:
        """Take the model out of the receive buffer, for the job of that number."""
        assert self.inbox is not None
        work, self.inbox = self.inbox, None
        self.number, self.seen = number + 1, work.version
        self.current = begun = Begun(client, number, work.version, work.steps or steps, self.steps_before)
        self.epochs[number] = epoch
        return begun, work

    def finish(self, finished: Finished) -> tuple[Finished | None, Begun | None]:
        """The job in hand is done: the update to send now, and the job whose update it overwrites."""
        self.current, self.steps_before = None, behind(finished[0])
        if not self.holds:
            return finished, None
        before, self.outbox = self.outbox, finished
        if before is not None:
            self.epochs.pop(before[0].job, None)
        return self.asked_for(), None if before is None else before[0]

    def asked_for(self) -> Finished | None:
        """The send buffer, if it was asked for: now, or as soon as what is being made is there."""
        if not self.asked or self.outbox is None or not (self.overlaps or self.current is None):
            return None
        finished, self.outbox = self.outbox, None
        return finished

    def sent(self, finished: Finished) -> None:
        self.asked = False
        self.unheard[finished[0].job] = finished

    # ---- what the server says -------------------------------------------------------------------
    def fetch(self) -> Finished | None:
        """The send buffer is asked for; unless the last update is not answered yet."""
        if self.unheard:
            return None
        self.asked = True
        return self.asked_for()

    def accepted(self, job: int) -> bool:
        """Whether it was waited for."""
        self.epochs.pop(job, None)
        if (sent := self.unheard.pop(job, None)) is None:
            return False
        self.delivered = max(self.delivered, sent[0].version)
        return True

    def give_up(self, job: int) -> None:
        """An update that is refused for good."""
        self.unheard.pop(job, None)
        self.epochs.pop(job, None)

    def drop(self, record: Drop) -> None:
        """Give up all."""
        self.current = self.outbox = self.inbox = None
        self.asked = False
        self.unheard.clear()
        self.epochs.clear()
        self.seen, self.number, self.steps_before = self.delivered, record.number, record.steps_before

    def void(self, record: Void) -> bool:
        """Give up a job that was begun on something that no longer holds; whether it was in hand."""
        if [record.job, record.version] not in [job[:2] for job in self.held()]:
            return False
        if self.current is not None and self.current.job == record.job:
            self.current = None
        if self.outbox is not None and self.outbox[0].job == record.job:
            self.outbox = None
        self.give_up(record.job)
        self.seen = self.delivered
        self.stand(record.number, record.steps_before)
        return True
