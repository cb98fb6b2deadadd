"""Figure 1 of the FedBuff analysis (Toghani, Uribe, 2022): the schedule of buffered against synchronous aggregation."""

from __future__ import annotations

import itertools
import json

from offbeat.errors import ConfigError
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.method import Policy
from offbeat.papers.recipe import Made, Settings, TableMade
from offbeat.records import Arrived, Commit, Row
from offbeat.runs import plots, report
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.rounds import Rounds

CLIENTS, LOCAL_STEPS, BUFFER, SHARE = 5, 3, 2, 0.6
UNTIL = 12.0


def fig1(settings: Settings) -> Made:
    """Figure 1: n = 5 clients, Q = 3 local steps, K = 2 in the buffer, beside synchronous rounds of 60 %."""
    if settings.only or settings.n:
        raise ConfigError(["fedbuff-fig1 draws one schedule; it takes neither --only nor --n"])
    fleet = build("custom", CLIENTS, seed=0, step_seconds={"law": "uniform", "low": 0.3, "high": 1.0}, latency=0.3)
    durations = fleet.durations(0, 0, 0)
    policies: dict[str, Policy] = {
        f"FedBuff, K = {BUFFER}, Q = {LOCAL_STEPS}": Buffer(BUFFER, LOCAL_STEPS),
        f"synchronous, {SHARE:.0%} of clients, Q = {LOCAL_STEPS}": Rounds(LOCAL_STEPS, round(SHARE * CLIENTS)),
    }
    panels: dict[str, list[Row]] = {}
    rows = []
    made = Made()
    for title, policy in policies.items():
        clock = VirtualClock(policy, durations, generator(0, "policy"))
        trace = panels[title] = list(itertools.takewhile(lambda row: row[0] <= UNTIL, clock))
        commits = sum(isinstance(record, Commit) for _, record in trace)
        updates = sum(isinstance(record, Arrived) for _, record in trace)
        rows.append([title, str(commits), str(updates)])
        made.figures.append({"schedule": title, "commits": commits, "updates": updates, "virtual_seconds": UNTIL})
    columns = ("schedule", f"commits in {UNTIL:.0f} s", "updates")
    made.tables.append(TableMade("FedBuff Figure 1: the same five clients, two schedules", columns, rows))
    made.files.append(plots.timeline(panels, settings.out / "fig1.png", UNTIL, CLIENTS))
    made.files.append(report.write_table(settings.out / "fig1.md", "FedBuff Figure 1", columns, rows))
    (settings.out / "fig1.json").write_text(json.dumps(made.figures, indent=1) + "\n")
    made.files.append(settings.out / "fig1.json")
    return made
