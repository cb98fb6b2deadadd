"""Every method, with options drawn at random, against a second implementation written from the papers."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from method_draws import NAMES, both, drawn, lost, trace_of
from offbeat.records import Begun, Commit

EACH = 15  # draws of each method
SOAK = 250


def compare(numbers: range) -> None:
    """Compare these draws of one method; the message names each that differs, and its options."""
    wrong = []
    for number in numbers:
        case = drawn(number)
        try:
            found = both(case)
        except Exception as error:
            raise AssertionError(f"draw {number}: {case}") from error
        if difference := found.difference:
            wrong.append(f"draw {number}: {difference}\n    {case}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_against_its_oracle(name: str) -> None:
    compare(range(NAMES.index(name), EACH * len(NAMES), len(NAMES)))


def test_the_draws_cover_what_can_go_wrong() -> None:
    """Comparisons would be worthless if staleness were always 0, or nobody ever left."""
    seen: Counter[str] = Counter()
    for number in range(0, EACH * len(NAMES), 3):
        case = drawn(number)
        rows = trace_of(case)
        begun = {record[:2]: record for _, record in rows if isinstance(record, Begun)}
        commits = [record.jobs for _, record in rows if isinstance(record, Commit)]
        staleness = [k - begun[job].version for k, jobs in enumerate(commits) for job in jobs]
        seen["stale"] += max(staleness) > 0
        seen["very stale"] += max(staleness) > 2
        seen["drawn twice"] += any(len(set(jobs)) < len(jobs) for jobs in commits)
        seen["several jobs of a client"] += any(len(dict(jobs)) < len(set(jobs)) for jobs in commits)
        seen["lost jobs"] += lost(rows)
        seen["unequal steps"] += len({job.steps for job in begun.values()}) > 1
    assert all(count >= 5 for count in seen.values()), seen


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_runs_against_their_oracle(name: str) -> None:
    """`METHOD_DRAWS=FIRST:LAST` compares the draws of another range."""
    first, last = map(int, os.environ.get("METHOD_DRAWS", f"{EACH}:{SOAK}").split(":"))
    compare(range(first * len(NAMES) + NAMES.index(name), last * len(NAMES), len(NAMES)))
