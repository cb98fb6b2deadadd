"""`offbeat choose`: which method, with which options, for this fleet, task and budget.

Constants are measured, what theory or the clock rules out is dropped with its reason, the rest is tuned briefly on a
part of the clients' data that no final figure uses, and the best are run over seeds. Tuning is shared: no trial goes on
for longer than a few times what the best one so far took, and only the best methods get all their trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offbeat.config import registry
from offbeat.errors import ConfigError, unknown
from offbeat.experiments.assemble import Built, build
from offbeat.experiments.experiment import Experiment
from offbeat.fleets.steps import Fixed
from offbeat.runs.bands import Interval, interval
from offbeat.runs.palette import duration, size
from offbeat.runs.progress import Progress
from offbeat.studies.search import COHORT, Candidate, Options, Score, Search, reached, require_judges, score_of
from offbeat.tasks.task import Task
from offbeat.theory import advise as theory
from offbeat.theory import fedagrac
from offbeat.theory.measure import Effort, Measured, measure
from offbeat.theory.theorems import ADVISED

CANDIDATES = (
    "local-sgd", "minibatch-sgd", "fednova", "scaffold", "fedagrac", "asysg", "fedasync", "fedbuff", "dlsgd-homo",
    "dlsgd-hetero", "hl-sgd", "hierarchical-local-sgd", "async-hl-sgd", "gossip-pga",
)  # fmt: skip
WAITING = {"local-sgd", "minibatch-sgd", "fednova", "scaffold", "fedagrac", "fedprox", "fedlin"}  # for a whole round
CORRECTED = {"fednova", "scaffold", "fedagrac", "fedlin", "minibatch-sgd", "asysg"}  # for unequal local steps
FINALISTS = 3
ALIKE = 1.3  # where the slowest client's step takes no longer than so many median ones, clients are equally fast
BRIEF = Effort(samples=16, noise_samples=4, rounds=3, local_steps=5)


@dataclass(frozen=True)
class Choice:
    """The answer: methods from the best on, what was dropped and why, and what all of it rests on."""

    ranked: tuple[Candidate, ...]
    dropped: Mapping[str, str]
    measured: Measured
    experiment: Experiment  # the recommended one
    target: float | None
    seeds: int
    reason: str

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    def figures(self, candidate: Candidate) -> dict[str, Any]:
        """What the final runs of a candidate came to, each with its 95 % interval."""
        results = [outcome.result for outcome in candidate.outcomes]
        if not results:
            return {}
        figures: dict[str, Any] = {
            "accuracy": interval([r["accuracy_final"] or 0.0 for r in results]),
            "bytes": interval([r["bytes_up"] + r["bytes_down"] + r["bytes_d2d"] for r in results]),
        }
        if self.target is not None:
            times = [reached(outcome, self.target) for outcome in candidate.outcomes]
            known = [time for time in times if time is not None]
            figures["reached"] = len(known)
            figures["seconds"] = interval(known) if known else None
        return figures

    def json(self) -> dict[str, Any]:
        ranked = []
        for candidate in self.ranked:
            told = {key: plain(value) for key, value in self.figures(candidate).items()}
            ranked.append({"method": candidate.spec, "trials": candidate.trials, "seeds": len(candidate.outcomes),
                           "score": list(candidate.score), "notes": candidate.notes, **told})  # fmt: skip
        return {
            "recommended": self.best.spec, "reason": self.reason, "target": self.target, "ranked": ranked,
            "dropped": dict(self.dropped), "verdict": self.measured.verdict, "toml": self.experiment.toml(),
        }  # fmt: skip


def plain(value: Any) -> Any:
    return dict(value._asdict()) if isinstance(value, Interval) else value


def choose(
    experiment: Experiment,
    target: float | None = None,
    methods: Sequence[str] = CANDIDATES,
    trials: int = 12,
    seeds: int = 3,
    progress: Callable[[str, Mapping[str, float]], Progress] | None = None,
) -> Choice:
    """Decide for the experiment's task and fleet within its limits (`until`); its method does not count. With a
    target, the least time to that accuracy wins; else the best accuracy at the end."""
    check(experiment, target, methods, trials, seeds)
    first = replace(experiment, method="local-sgd", targets=() if target is None else (target,))
    measured = measure(replace(first, method=one_of(first, methods)), effort=BRIEF)
    candidates, dropped = admitted(first, methods, measured)
    if not candidates:
        raise ConfigError([f"{name}: {why}" for name, why in dropped.items()])
    require_judges(replace(first, method=candidates[0].method))
    search = Search(first, target, progress)
    search.open(candidates)
    for candidate in sorted(candidates, key=lambda one: one.score):
        search.climb(candidate, max(1, trials // 2))
    for candidate in sorted(candidates, key=lambda one: one.score)[: FINALISTS + 1]:
        search.climb(candidate, trials)
    ordered = sorted(candidates, key=lambda one: one.score)
    for candidate in ordered[:FINALISTS]:
        search.final(candidate, seeds)
    ranked = sorted(ordered, key=lambda one: rank(one, target))
    for candidate in ranked[:FINALISTS]:
        covered(candidate, first, measured)
    best = ranked[0]
    recommended = replace(first, method=best.spec, evaluate=search.evaluate(first.until, search.fastest))
    why = reason(best, ranked, build(replace(first, method=best.spec)), target)
    return Choice(tuple(ranked), dropped, measured, recommended, target, seeds, why)


def check(experiment: Experiment, target: float | None, methods: Sequence[str], trials: int, seeds: int) -> None:
    problems = []
    for name in methods:
        if ":" in name or name in registry.added("method"):  # one of somebody's own
            registry.find("method", name)
        elif name not in CANDIDATES:
            problems.append(unknown("method to choose from", name, CANDIDATES))
    if target is not None and not 0 < target <= 1:
        problems.append(f"target = {target}; an accuracy is a share above 0 and at most 1")
    if not set(experiment.until) - {"accuracy", "accuracy_smoothed", "loss"}:
        problems.append("give a budget, such as virtual_seconds=60: without one a method that never learns never ends")
    problems += [f"{name} = {value}; give at least 1" for name, value in (("trials", trials), ("seeds", seeds))
                 if value < 1]  # fmt: skip
    if not isinstance(experiment.task, str | Mapping) and not isinstance(experiment.task, Task):
        problems.append("task must be a name, a table or a Task")
    if problems:
        raise ConfigError(problems)


def one_of(experiment: Experiment, methods: Sequence[str]) -> str:
    """A method that can be built here: constants are asked of the problem, whoever runs it."""
    problems: list[str] = []
    for method in methods:
        try:
            build(replace(experiment, method=method))
        except ConfigError as error:
            problems += error.problems
        else:
            return method
    raise ConfigError(dict.fromkeys(problems))


# ---- what is ruled out --------------------------------------------------------------------------
def admitted(
    experiment: Experiment, methods: Sequence[str], measured: Measured
) -> tuple[list[Candidate], dict[str, str]]:
    """The methods that can work here, and why the others cannot."""
    candidates, dropped = [], {}
    for method in methods:
        candidate = Candidate(method)
        try:
            built = build(replace(experiment, method=method))
        except ConfigError as error:
            dropped[method] = error.problems[0]
            continue
        candidate.options = sized(built)
        built = build(replace(experiment, method=candidate.spec))
        why = forbidden(candidate, built, measured)
        if why:
            dropped[method] = why
        else:
            candidates.append(candidate)
    return candidates, dropped


def sized(built: Built) -> Options:
    """The options to begin with: defaults, with cohorts that a small fleet can fill."""
    table = built.experiment.table()["method"]
    start: Options = {}
    for name in COHORT:
        if isinstance(table.get(name), int):
            start[name] = max(1, min(table[name], built.units // 2 or 1))
    return start


def forbidden(candidate: Candidate, built: Built, measured: Measured) -> str | None:
    """What theory or the clock has against a method here; notes its pace."""
    law = built.fleet.local_steps
    if isinstance(law, Fixed) and len(set(law.steps)) > 1 and candidate.method not in CORRECTED:
        bias = inconsistency(law.steps, measured)
        return (
            f"clients take {min(law.steps)} to {max(law.steps)} local steps, and averaging then tends to another point "
            f"than the optimum, {bias} (FedaGrac, Theorem 1); fedagrac, fednova and scaffold correct this"
        )
    heard: set[int] = set()
    account, horizon = built.account(), built.horizon(built.clock())
    for done, step in enumerate(horizon):
        versions = horizon.skipped(step.commit)
        account.take(step.rows, step.commit.jobs, [done - version for version in versions])
        heard.update(client for client, _ in step.commit.jobs)
        if done >= 2000:
            break
    candidate.idle, candidate.commits = account.idle_share(), account.commits
    if account.commits == 0:
        return "it makes no commit within the budget: a round takes longer than that"
    never = built.units - len(heard)
    zeta, slope = math.sqrt(measured.constants.divergence or 0.0), slope_of(measured)
    if never > 0.2 * built.units and zeta > slope and candidate.method not in WAITING:
        return (
            f"within the budget its commits never hear {never} of {built.units} clients, and clients disagree on "
            f"direction (zeta is {zeta / max(slope, 1e-12):.2g} times the mean gradient): the model would not be theirs"
        )
    stale = max(account.staleness, default=0)
    candidate.notes.append(
        f"{account.commits}{'+' if account.commits > 2000 else ''} commits in the budget, clients idle "
        f"{candidate.idle:.0%} of the time, staleness up to {stale}"
    )
    return None


def slope_of(measured: Measured) -> float:
    return next((reading.value for reading in measured.readings if reading.name == "grad"), 0.0)


def inconsistency(steps: Sequence[int], measured: Measured) -> str:
    losses = measured.constants.client_losses
    if losses is None:
        return "whatever the rate"
    counts = fedagrac.Steps(tuple(steps), (1 / len(steps),) * len(steps))
    return f"by up to {fedagrac.inconsistency(counts, losses):.3g} in the loss"


def rank(candidate: Candidate, target: float | None) -> tuple[float, float, Score]:
    """Those that were run over seeds come first, by the share of seeds that missed the target; among equals by the mean
    time of the seeds that reached it, or by accuracy where none did."""
    if not candidate.outcomes:
        return 9.0, 0.0, candidate.score
    scores = [score_of(outcome.metrics, target) for outcome in candidate.outcomes]
    times = [value for kind, value in scores if kind == 0.0]
    missed = 1 - len(times) / len(scores)
    return missed, float(np.mean(times or [value for _, value in scores])), candidate.score


# ---- what it says -------------------------------------------------------------------------------
def covered(candidate: Candidate, experiment: Experiment, measured: Measured) -> None:
    """What the theorems say of the options that were chosen."""
    if candidate.method not in ADVISED:
        candidate.notes.append("no theorem here speaks of it: experience alone")
        return
    spec = replace(experiment, method=candidate.spec)
    own = replace(measured, schedule=theory.schedule_for(measured, spec, candidate.method))
    plan, counsels = theory.advise(own, spec, candidate.method)
    candidate.notes.append(f"theory: {theory.opening(spec, candidate.method, plan, counsels)}")


def reason(best: Candidate, ranked: Sequence[Candidate], built: Built, target: float | None) -> str:
    """Why the first stands first, from what the clock and the runs say."""
    second = next((other for other in ranked[1:] if other.outcomes), None)
    reaching = 0 if target is None else sum(reached(outcome, target) is not None for outcome in best.outcomes)
    waiting = next((other for other in ranked if other.method in WAITING), None)
    said = []
    steps = built.fleet.step_seconds
    spread = float(steps.max() / max(float(np.median(steps)), 1e-12))
    slowest = f"the slowest client takes {spread:.2g} times as long for a step as the median one"
    if built.hybrid is not None:
        said.append("devices of a cluster exchange models over their own links, so fewer reports go to the server")
        if best.method == "async-hl-sgd":
            said.append("and clusters need not wait for one another")
    elif best.method in WAITING and spread < ALIKE:
        said.append("clients are equally fast: rounds wait for nobody, and nothing is stale")
    elif best.method in WAITING:
        said.append(f"{slowest}, but its updates are worth more than the waiting costs, and nothing is stale")
    elif spread < ALIKE:
        said.append("clients are equally fast, and it commits more often than rounds do, with little staleness")
    else:
        other = (
            f", where rounds ({waiting.method}) leave clients idle {waiting.idle:.0%} of the time" if waiting else ""
        )
        said.append(f"{slowest}; it does not wait for it (idle {best.idle:.0%}{other})")
    if second is not None and target is not None:
        one, two = (mean_time(candidate, target) for candidate in (best, second))
        if one is not None and two is not None:
            said.append(f"{second.method} took {two / max(one, 1e-12):.2g} times as long to the target")
        elif one is not None:
            said.append(f"{second.method} did not always reach the target")
    if 0 < reaching < len(best.outcomes):
        said.append(f"only {reaching} of {len(best.outcomes)} seeds reached the target")
    return "; ".join(said)


def mean_time(candidate: Candidate, target: float) -> float | None:
    times = [reached(outcome, target) for outcome in candidate.outcomes]
    known = [time for time in times if time is not None]
    return float(np.mean(known)) if len(known) == len(times) and known else None


def rows(choice: Choice) -> list[list[str]]:
    """The ranking as a table: method, options, time to the target, accuracy, bytes."""
    table = []
    for number, candidate in enumerate(choice.ranked, 1):
        options = ", ".join(f"{key} {value:g}" for key, value in candidate.options.items())
        figures = choice.figures(candidate)
        if not figures:
            said = "not run over seeds: behind in tuning"
            table.append([str(number), candidate.method, options or "defaults", said, "", ""])
            continue
        time = "-"
        if choice.target is not None:
            made, many = figures["seconds"], figures["reached"]
            time = "not reached" if made is None else duration(made.mean) + ends(made, duration)
            time += "" if many in (0, len(candidate.outcomes)) else f" ({many} of {len(candidate.outcomes)} seeds)"
        accuracy, sent = figures["accuracy"], figures["bytes"]
        table.append([
            str(number), candidate.method, options or "defaults", time,
            f"{accuracy.mean:.3f}" + ends(accuracy, "{:.3f}".format), size(sent.mean) + ends(sent, size),
        ])  # fmt: skip
    return table


def ends(made: Interval, form: Callable[[float], str]) -> str:
    return "" if made.low is None or made.high is None else f" ({form(max(0.0, made.low))} to {form(made.high)})"
