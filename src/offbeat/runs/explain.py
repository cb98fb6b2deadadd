"""Where the time of a run went, from its trace, and what to change about it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.records import Arrived, Begun, Commit, Finished, Joined, Left, Overwritten, Row, Start
from offbeat.runs.callbacks import remedy

MANY = 0.25  # a share of the time that is worth a word
KINDS = ("computing", "download", "upload", "waiting", "away")


@dataclass
class Unit:
    """One client (or cluster) as its rows go by. `free` is since when it neither computes nor transfers."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    free: float = 0.0
    ordered: float | None = None  # when a Start was sent to it
    begun: float | None = None
    finished: float | None = None  # and not yet arrived
    left: float | None = None
    gone: float = 0.0  # time away since it was free

    def rest(self, until: float) -> None:
        """What lies between its last work and `until`: transfers, absence, and otherwise waiting."""
        if self.finished is not None:  # it is still sending
            self.seconds["upload"] += max(0.0, until - self.finished)
            self.finished = None
            self.free = until
        end = until
        if self.ordered is not None:
            since = max(self.ordered, self.free)
            self.seconds["download"] += max(0.0, until - since)
            end, self.ordered = since, None
        away = min(
            self.gone + (0.0 if self.left is None else end - max(self.left, self.free)), max(0.0, end - self.free)
        )
        self.seconds["away"] += max(0.0, away)
        self.seconds["waiting"] += max(0.0, end - self.free - max(0.0, away))
        self.free, self.gone = until, 0.0
        if self.left is not None:
            self.left = until


@dataclass(frozen=True)
class Spent:
    """Shares of the time of all clients, and who was waited for."""

    shares: dict[str, float]
    last: list[tuple[int, int]]  # clients whose update was the last before a commit, and how often
    commits: int
    seconds: float
    units: int


def spent(rows: Iterable[Row], units: int | None) -> Spent:
    """Where the time of so many clients went; None: of those that the trace names."""
    each: defaultdict[int, Unit] = defaultdict(Unit)
    for client in range(units or 0):
        each[client]
    now, commits = 0.0, 0
    last: Counter[int] = Counter()
    latest: int | None = None
    for now, record in rows:
        if isinstance(record, Commit):
            commits += 1
            if latest is not None:
                last[latest] += 1
            continue
        if isinstance(record, Start):
            each[record.client].ordered = now
        elif isinstance(record, Begun):
            unit = each[record.client]
            unit.rest(now)
            unit.begun = now
        elif isinstance(record, Finished):
            unit = each[record.client]
            compute(unit, now)
            unit.finished = now
        elif isinstance(record, Arrived):
            unit = each[record.client]
            latest = record.client
            if unit.finished is not None:
                unit.seconds["upload"] += now - unit.finished
                unit.finished, unit.free = None, now
        elif isinstance(record, Overwritten):
            compute(each[record.client], now)
        elif isinstance(record, Left):
            each[record.client].left = now
        elif isinstance(record, Joined):
            unit = each[record.client]
            if unit.left is not None:
                unit.gone += now - max(unit.left, unit.free)
                unit.left = None
    for unit in each.values():
        if unit.begun is not None:
            compute(unit, now)
        else:
            unit.rest(now)
    whole = now * len(each)
    shares = {kind: sum(u.seconds[kind] for u in each.values()) / whole if whole else 0.0 for kind in KINDS}
    return Spent(shares, last.most_common(5), commits, now, len(each))


def compute(unit: Unit, now: float) -> None:
    """It has computed until now, if it did."""
    if unit.begun is not None:
        unit.seconds["computing"] += now - unit.begun
        unit.begun, unit.free = None, now


def counsel(
    spending: Spent, result: Mapping[str, Any], config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What to change, each with its reason; empty where nothing stands out."""
    said = []
    shares = spending.shares
    staleness, computed = result.get("staleness", {}), result.get("jobs_computed") or 0
    rounds = staleness.get("max", 0) == 0
    if result.get("diverging"):
        said.append(str(result["diverging"]))
    elif str(result.get("ended", "")).startswith("stopped"):
        said.append(f"The run {result['ended']} {remedy(config)}.")
    if shares["waiting"] > MANY and rounds:
        slow = ", ".join(str(client) for client, _ in spending.last[:3])
        said.append(
            f"Clients wait {shares['waiting']:.0%} of the time, for the slowest of their round (most often {slow}). "
            "A method that commits what has arrived (fedbuff, dlsgd-homo) does not wait; over_selection and a deadline "
            "shorten rounds."
        )
    elif shares["waiting"] > MANY:
        said.append(
            f"Clients wait {shares['waiting']:.0%} of the time although nobody waits for rounds: a larger concurrency "
            "gives them work."
        )
    transfer = shares["download"] + shares["upload"]
    if transfer > MANY:
        said.append(
            f"Transfers take {transfer:.0%} of the time: more local_steps for each of them, or fewer bytes "
            '(stages = "int8" takes a quarter).'
        )
    if (dead := result.get("share_dead", 0.0)) > 0.1:
        said.append(
            f"{dead:.0%} of the updates were overwritten or lost before anybody used them: fewer local_steps, or a "
            "smaller concurrency."
        )
    if staleness.get("mean", 0.0) > 5:
        said.append(
            f"Updates are {staleness['mean']:.1f} versions old on average: a larger buffer_size or n, a smaller "
            'concurrency, or weights by staleness (staleness = "polynomial").'
        )
    if never := result.get("participation", {}).get("never", 0):
        said.append(f"{never} clients were never heard: run longer, or sample those that are there more evenly.")
    if result.get("rung") in ("reference", "one by one") or result.get("mode") in ("reference", "twin"):
        said.append("Clients were computed one after the other; see the notes for the reason.")
    waves = result.get("waves") or 0
    if waves and computed / waves < 4 and spending.units > 8:
        said.append(
            f"A wave had {computed / waves:.1f} jobs on average, so little is computed together: larger commits or a "
            "larger concurrency make waves larger (memory_gib limits them, too)."
        )
    scores = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
    if len(scores) >= 4 and max(scores) - scores[-1] > 0.05:
        said.append(
            f"The accuracy ends at {scores[-1]:.4f}, below its best of {max(scores):.4f}: a rate that falls "
            '(schedule = "step"), or the callbacks keep-best and early-stopping.'
        )
    elif len(scores) >= 4 and scores[-1] == max(scores) and scores[-1] - scores[len(scores) // 2] > 0.02:
        said.append("The accuracy was still rising at the end: `offbeat resume --until ...` goes on.")
    return said
