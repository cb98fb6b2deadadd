"""Who did what when: the rows of a trace as spans, one after another for each client. Pictures and pages draw these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from offbeat.records import Arrived, Begun, Commit, Fetch, Finished, JobName, Joined, Left, Overwritten, Row, Start

KINDS = ("download", "compute", "unused", "wait", "upload", "lost", "away")
MEANS = {
    "download": "download",
    "compute": "local steps",
    "unused": "local steps of which nothing was used",
    "wait": "update waits to be asked for",
    "upload": "upload",
    "lost": "job given up or lost",
    "away": "not there",
}


class Span(NamedTuple):
    since: float
    end: float
    client: int
    kind: str  # of KINDS
    version: int  # that the job started from; -1: none


class Timeline(NamedTuple):
    spans: list[Span]
    commits: list[float]  # times; the commit of index v makes version v + 1
    end: float


def timeline_of(rows: Iterable[Row]) -> Timeline:
    """Spans in the order in which they end; what goes on at the last row ends there. An update that was overwritten in
    its send buffer is `unused`."""
    spans: list[Span] = []
    commits: list[float] = []
    ordered: dict[int, float] = {}  # since when a client's download goes on
    fetched: dict[int, float] = {}  # since when the server waits for a client's update
    begun: dict[JobName, tuple[float, int]] = {}
    working: dict[int, JobName] = {}
    finished: dict[JobName, float] = {}
    places: dict[JobName, int] = {}  # where the computing of a job stands among the spans
    away: dict[int, float] = {}
    now = 0.0

    def lose(client: int) -> None:
        job = working.pop(client, None)
        if job is not None and job in begun:
            since, version = begun.pop(job)
            spans.append(Span(since, now, client, "lost", version))
        ordered.pop(client, None)

    for now, record in rows:
        kind = type(record)
        if kind is Start:
            ordered[record.client] = now  # type: ignore[union-attr]
        elif isinstance(record, Begun):
            since = ordered.pop(record.client, None)
            if since is not None and record.client not in away:
                spans.append(Span(since, now, record.client, "download", record.version))
            begun[record[:2]] = (now, record.version)
            working[record.client] = record[:2]
        elif isinstance(record, Finished):
            since, version = begun[record[:2]]
            places[record[:2]] = len(spans)
            spans.append(Span(since, now, record.client, "compute", version))
            finished[record[:2]] = now
            working.pop(record.client, None)
        elif isinstance(record, Fetch):
            fetched[record.client] = now
        elif isinstance(record, Arrived):
            since, asked = finished.pop(record[:2]), fetched.pop(record.client, 0.0)
            if asked > since:
                spans.append(Span(since, asked, record.client, "wait", record.version))
            spans.append(Span(max(since, asked), now, record.client, "upload", record.version))
        elif isinstance(record, Overwritten):
            if working.get(record.client) == record[:2]:
                lose(record.client)
            elif record[:2] in places:
                at = places.pop(record[:2])
                spans[at] = spans[at]._replace(kind="unused")
                finished.pop(record[:2], None)
        elif isinstance(record, Left):
            lose(record.client)
            away[record.client] = now
        elif isinstance(record, Joined):
            since = away.pop(record.client, None)
            if since is not None:
                spans.append(Span(since, now, record.client, "away", -1))
        elif kind is Commit:
            commits.append(now)
    spans += [Span(since, now, client, "away", -1) for client, since in away.items()]
    spans += [Span(begun[job][0], now, client, "compute", begun[job][1]) for client, job in working.items()]
    return Timeline(spans, commits, now)
