"""Looking ahead: time never depends on values, so the schedule runs ahead of the numerics.

The horizon hands out commits in order and knows, for the commits within its window, which jobs they will consume.
So a wave can take every job whose start version is ready and whose update will be used, and no other.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from offbeat.errors import OffbeatError
from offbeat.records import Begun, Commit, Drop, Finished, JobName, Left, Overwritten, Row, Start


class Driver(Protocol):
    """Anything that yields rows: the virtual clock, replay, a live server."""

    @property
    def floor(self) -> int:
        """No job that begins later by broadcast starts from an older version."""

    @property
    def refused(self) -> Mapping[str, int]:
        """How many events were late, repeated or unknown, and kept from the policy."""

    def __iter__(self) -> Iterator[Row]: ...


class Step(NamedTuple):
    """The rows up to and including one commit."""

    time: float
    commit: Commit
    rows: list[Row]


PATIENCE = 100_000, 100  # rows without a commit, and for each client at work or on the move: then a schedule is stuck
BREATH = 1 << 12  # rows between two looks at whether somebody wants an end


class Horizon:
    """Commits in order, with the commits that consume the next `ahead` updates already known.

    How far it looks depends on the schedule alone and never on a run's limits, so that a run that is resumed, extended
    or replayed forms the same waves. `last` and `until` say which commits are handed out.
    """

    def __init__(
        self, driver: Driver, ahead: int = 1024, last: int | None = None, until: float | None = None,
        memory: bool = False,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.source = iter(driver)
        self.ahead = ahead
        self.queued = 0  # updates consumed by the commits in `steps`
        self.last = last  # commits that are handed out at most
        self.until = math.inf if until is None else until  # commits after this time are not
        self.late = False  # such a commit is the next
        self.stuck: float | None = None  # the time at which the schedule was given up: no commit comes any more
        self.stop = False  # somebody wants an end
        self.given = 0
        self.now = 0.0
        self.memory = memory  # finished jobs move their client's memory: each is wanted, and they go in order
        self.pending: set[JobName] = set()  # wanted for that, and whether a commit takes them is not known yet
        self.unused: set[JobName] = set()  # wanted for that alone
        self.lost: list[JobName] = []  # computed before it was known that no commit takes them
        self.steps: deque[Step] = deque()
        self.begun: dict[JobName, Begun] = {}  # not yet consumed, as far as the window knows
        self.wanted: dict[JobName, Begun] = {}  # consumed by a commit of the window, in order of need
        self.ordered: dict[int, list[int]] = {}  # versions under way to a client that has not begun on them
        # Versions that some known job still has to start from, with how many; those from `driver.floor` on are needed
        # besides.
        self.held: Counter[int] = Counter()
        self.closed = False

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self.last is not None and self.given >= self.last:
            raise StopIteration
        while not self.closed and not self.steps and self.now <= self.until:
            self.look(self.until)
        self.late = (self.steps[0].time if self.steps else self.now) > self.until
        if self.late or not self.steps:
            if self.stuck is not None and not self.late:
                raise OffbeatError(self.complaint())
            raise StopIteration
        self.fill()
        step = self.steps.popleft()
        self.given += 1
        self.queued -= len(step.commit.jobs)
        return step

    def complaint(self) -> str:
        return (
            f"the schedule makes no commit after number {self.given}: until {self.stuck:.6g} virtual s it had told "
            f"{PATIENCE[0]:,} rows and more without one. Clients that are never there together, a deadline that nobody "
            "meets or jobs that are always lost are the usual reasons; change the fleet or the method's schedule"
        )

    def fill(self) -> None:
        """Look as far ahead as the next commit will need; worth doing while a device computes."""
        while not self.closed and (self.queued < self.ahead or not self.steps):
            self.look()

    def look(self, until: float = math.inf) -> None:
        """Read rows up to the next commit, or up to a time behind which nobody asks for one."""
        rows: list[Row] = []
        begun, held, ordered = self.begun, self.held, self.ordered
        moving: set[int] = set()  # who came or went since the last commit
        for row in self.source:
            if row[0] > until:
                self.now = row[0]
                return
            rows.append(row)
            record = row[1]
            if type(record) is Begun:
                begun[record[:2]] = record
                held[record.version] += 1
                self.deliver(record.client, record.version)
            elif type(record) is Start:
                ordered.setdefault(record.client, []).append(record.version)
                held[record.version] += 1
            elif type(record) is Overwritten:
                job = record[:2]
                if job in self.pending:
                    self.pending.discard(job)
                    self.unused.add(job) if job in self.wanted else self.lost.append(job)
                elif (lost := begun.pop(job, None)) is not None:
                    self.release(lost.version)
            elif type(record) is Finished:
                if self.memory:  # in the order of finishing, which is the order of a client's jobs
                    self.wanted[record[:2]] = begun.pop(record[:2])
                    self.pending.add(record[:2])
            elif type(record) is Drop or type(record) is Left:
                self.deliver(record.client, sys.maxsize)
                moving.add(record.client)
            elif type(record) is Commit:
                for job in record.jobs:
                    self.pending.discard(job)
                    if job in begun:
                        self.wanted[job] = begun.pop(job)
                self.queued += len(record.jobs)
                self.now = row[0]
                self.steps.append(Step(row[0], record, rows))
                return
            if not len(rows) % BREATH:
                self.now = row[0]
                if self.stop:
                    raise KeyboardInterrupt
                if len(rows) > PATIENCE[0] + PATIENCE[1] * (len(begun) + len(ordered) + len(moving)):
                    self.stuck = row[0]
                    break
        self.closed = True

    def ready(self, version: int) -> list[Begun]:
        """Jobs that will be consumed and whose start version exists, the most urgent first.

        With memory only the first that is left of each client, and those that only move a memory are among them.
        """
        if not self.memory:
            return [job for job in self.wanted.values() if job.version <= version]
        first: dict[int, Begun] = {}
        for job in self.wanted.values():
            first.setdefault(job.client, job)
        return [job for job in first.values() if job.version <= version]

    @property
    def refused(self) -> Mapping[str, int]:
        """How many events were kept from the policy, by reason."""
        return self.driver.refused

    def ask_to_stop(self) -> None:
        """Look no further, even where no commit is in sight."""
        self.stop = True

    def job(self, name: JobName) -> Begun | None:
        """A job that a commit of the window will consume, and that is not computed yet."""
        return self.wanted.get(name)

    def strike_off(self, computed: Callable[[int, int], bool]) -> None:
        """Strike off the jobs that were computed before, by client and number."""
        for name in [name for name in self.wanted if computed(*name)]:
            self.computed(name)

    def needs(self, version: int) -> bool:
        """Whether a job may still start from a version."""
        return version >= self.driver.floor or version in self.held

    def take_lost(self) -> list[JobName]:
        """Jobs that were computed before it was known that no commit takes them; each is told once."""
        lost, self.lost = self.lost, []
        return lost

    def skipped(self, commit: Commit) -> list[int]:
        """Strike off the jobs of a commit that is not made again (a resumed run); their start versions, in order."""
        versions = [self.wanted[job].version for job in commit.jobs]
        for job in commit.jobs:
            self.computed(job)
        return versions

    def computed(self, job: JobName) -> None:
        """Strike a job off: its update is there, or lost for good."""
        if job in self.wanted:
            self.release(self.wanted.pop(job).version)

    def consumed(self, job: JobName) -> bool:
        """Whether a commit will take the update of a job that was computed; else it is forgotten."""
        if job not in self.unused:
            return True
        self.unused.discard(job)
        return False

    def deliver(self, client: int, version: int) -> None:
        """Orders up to this version are no longer under way to a client."""
        under_way = self.ordered.pop(client, [])
        for overtaken in under_way:
            if overtaken <= version:
                self.release(overtaken)
        if later := [v for v in under_way if v > version]:
            self.ordered[client] = later

    def release(self, version: int) -> None:
        self.held[version] -= 1
        if not self.held[version]:
            del self.held[version]

    # ---- checkpoints ----------------------------------------------------------------------------
    def known(self) -> dict[str, list[tuple[int, ...]]]:
        """Jobs and orders as rows of numbers; nothing where it broke off between two commits."""
        if self.closed or (self.late and not self.steps):
            return {}
        return {
            "begun": [*self.begun.values()],
            "wanted": [*self.wanted.values()],
            "pending": sorted(self.pending),
            "unused": sorted(self.unused),
            "lost": sorted(self.lost),
            "ordered": [(client, version) for client, versions in self.ordered.items() for version in versions],
        }

    @property
    def read(self) -> int:
        """Commits that were read from the schedule, handed out or not."""
        return self.given + len(self.steps)

    def restore(self, known: Mapping[str, Sequence[Sequence[int]]], given: int, read: int) -> None:
        """Be where another was that had handed out `given` commits and read so many. The rows of those that were handed
        out have been passed."""
        self.given = given
        while self.read < read and (step := self.next_step()) is not None:
            self.steps.append(step)
        self.queued = sum(len(step.commit.jobs) for step in self.steps)
        jobs = {name: [Begun(*job) for job in known[name]] for name in ("begun", "wanted")}
        self.begun, self.wanted = ({job[:2]: job for job in jobs[name]} for name in ("begun", "wanted"))
        names: dict[str, list[JobName]] = {
            name: [(client, job) for client, job in known[name]] for name in ("pending", "unused", "lost")
        }
        self.pending, self.unused, self.lost = set(names["pending"]), set(names["unused"]), names["lost"]
        for client, version in known["ordered"]:
            self.ordered.setdefault(client, []).append(version)
        # Every job that is known and not computed holds its start version, and so does every order under way.
        self.held = Counter([job.version for each in jobs.values() for job in each])
        self.held.update(version for _, version in known["ordered"])

    def next_step(self) -> Step | None:
        """The rows up to the next commit, without a look at what they say."""
        rows: list[Row] = []
        for row in self.source:
            rows.append(row)
            if type(row[1]) is Commit:
                return Step(row[0], row[1], rows)
        return None
