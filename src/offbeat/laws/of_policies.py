"""What must hold of every policy. A law gives a sentence on what fails, or None."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from offbeat.assemble import Built, build
from offbeat.config import Experiment
from offbeat.errors import OffbeatError
from offbeat.keys import generator
from offbeat.laws.worlds import bowls, clients_for, fleet_for, quiet
from offbeat.method import Method, Policy
from offbeat.methods import METHODS
from offbeat.records import Arrived, Begun, Commit, Drop, Left, Row, Start
from offbeat.schedule.guard import restore

COMMITS, ROWS = 40, 20_000


def world(policy: Policy) -> Built:
    """Plain local steps under the policy, on clients of unequal speed."""
    clients, sizes = clients_for(policy)
    method = Method("under trial", policy, METHODS["local-sgd"]().what)
    fleet = fleet_for(policy, clients, sizes)
    return build(Experiment(method=method, task=bowls(clients), fleet=fleet, device="cpu"))


def rows_of(policy: Policy) -> list[Row]:
    """The schedule up to the last of some commits, or as far as it comes in many rows."""
    rows: list[Row] = []
    commits = 0
    with quiet():
        for row in islice(world(policy).clock(), ROWS):
            rows.append(row)
            commits += isinstance(row[1], Commit)
            if commits == COMMITS:
                break
    return rows


def commits(policy: Policy) -> str | None:
    """It goes on making commits."""
    rows = rows_of(policy)
    many = sum(isinstance(row, Commit) for _, row in rows)
    return None if many == COMMITS else f"after {len(rows)} events and commands it has made {many} commits"


def same(policy: Policy) -> str | None:
    """The same events give the same commands."""
    one, other = rows_of(policy), rows_of(policy)
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"the second time row {place} is {b[1]} at {b[0]:g} s, the first time it was {a[1]} at {a[0]:g} s"
    return None if len(one) == len(other) else "the second time the schedule is of another length"


def restored(policy: Policy) -> str | None:
    """A conductor that is fed its history says what was recorded."""
    built = world(policy)
    try:
        restore(policy, built.units, generator(0, "policy"), rows_of(policy))
    except OffbeatError as error:
        return str(error)
    return None


def once(policy: Policy) -> str | None:
    """A commit takes jobs that have arrived, and none that another commit has taken."""
    arrived: set[tuple[int, int]] = set()
    committed: set[tuple[int, int]] = set()
    for place, (_, row) in enumerate(rows_of(policy)):
        if isinstance(row, Arrived):
            arrived.add((row.client, row.job))
        elif isinstance(row, Commit):
            if early := set(row.jobs) - arrived:
                return f"at row {place} it commits job {min(early)[1]} of client {min(early)[0]}, which has not arrived"
            if twice := set(row.jobs) & committed:
                return f"at row {place} it commits job {min(twice)[1]} of client {min(twice)[0]} a second time"
            if not row.jobs:
                return f"at row {place} it makes a commit of no update"
            committed |= set(row.jobs)
    return None


def known(policy: Policy) -> str | None:
    """Work begins from versions that exist, for clients that exist."""
    version, units = 0, world(policy).units
    for place, (_, row) in enumerate(rows_of(policy)):
        version += isinstance(row, Commit)
        if isinstance(row, Start) and not (0 <= row.version <= version and 0 <= row.client < units):
            return f"at row {place} it says {row}, with {units} clients and {version} as the newest version"
    return None


def honest(policy: Policy) -> str | None:
    """It does what it says of itself: `orders`, `cohort`, `drops`."""
    rows = rows_of(policy)
    steps = {row.steps for _, row in rows if isinstance(row, Begun)}
    if policy.orders is not None and policy.orders not in steps:
        return f"`orders` is {policy.orders}, but jobs of {sorted(steps)} steps were begun"
    sizes = {len(row.jobs) for _, row in rows if isinstance(row, Commit)}
    if policy.cohort is not None and max(sizes) > policy.cohort:
        return f"`cohort` is {policy.cohort}, but a commit has {max(sizes)} updates"
    left = any(isinstance(row, Left) for _, row in rows)
    if not policy.drops and not left and any(isinstance(row, Drop) for _, row in rows):
        return "`drops` is false, but it drops jobs of clients that stay"
    return None


LAWS: tuple[Callable[[Policy], str | None], ...] = (commits, same, restored, once, known, honest)
