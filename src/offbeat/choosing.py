"""`offbeat choose`: which method, with which options, for this fleet, task and budget.

Constants are measured, what theory or the clock rules out is dropped with its reason, the rest is tuned briefly on a
part of the clients' data that no final figure uses, and the best are run over seeds. Tuning is shared: no trial goes on
for longer than a few times what the best one so far took, and only the best methods get all their trials.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from offbeat import advise as theory
from offbeat.assemble import Built, build
from offbeat.config import Experiment
from offbeat.errors import BadNumbers, ConfigError, Diverging, OffbeatError, unknown
from offbeat.experiment import run
from offbeat.fleets.steps import Fixed
from offbeat.measure import Effort, Measured, measure
from offbeat.meters import fedagrac
from offbeat.meters.theorems import THEOREMS
from offbeat.runs.bands import Interval, interval
from offbeat.runs.loop import Outcome
from offbeat.runs.palette import duration, size
from offbeat.runs.progress import Progress
from offbeat.runs.target import crossing
from offbeat.schedule.hybrid import Hybrid
from offbeat.tasks.task import Task

CANDIDATES = (
    "local-sgd", "minibatch-sgd", "fednova", "scaffold", "fedagrac", "asysg", "fedasync", "fedbuff", "dlsgd-homo",
    "dlsgd-hetero", "hl-sgd", "hierarchical-local-sgd", "async-hl-sgd", "gossip-pga",
)  # fmt: skip
WAITING = {"local-sgd", "minibatch-sgd", "fednova", "scaffold", "fedagrac", "fedprox", "fedlin"}  # for a whole round
CORRECTED = {"fednova", "scaffold", "fedagrac", "fedlin", "minibatch-sgd", "asysg"}  # for unequal local steps
SERVER = ("server_lr", "beta", "alpha")  # what a method calls the server's rate, the first that it has
COHORT = ("n", "buffer_size")
HELD_OUT = 5  # every fifth sample of a client is for validation
CUT = 2.5  # a trial ends after so many times what the best took
LOOKS = 120  # evaluations within the budget
FINALISTS = 3
BRIEF = Effort(samples=16, noise_samples=4, rounds=3, local_steps=5)
Options = dict[str, Any]
Score = tuple[float, float]  # the less the better: (0, seconds to the target), (1, -accuracy), (2, 0) where it diverged


@dataclass
class Candidate:
    """A method on its way through the choice."""

    method: str
    options: Options = field(default_factory=dict)  # the best so far
    score: Score = (3.0, 0.0)
    trials: int = 0
    outcomes: list[Outcome] = field(default_factory=list)  # of the final runs, one per seed
    notes: list[str] = field(default_factory=list)
    idle: float = 0.0
    commits: int = 0

    @property
    def spec(self) -> Options:
        return {"name": self.method, **self.options}


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
        found: dict[str, Any] = {
            "accuracy": interval([r["accuracy_final"] or 0.0 for r in results]),
            "bytes": interval([r["bytes_up"] + r["bytes_down"] + r["bytes_d2d"] for r in results]),
        }
        if self.target is not None:
            times = [reached(outcome, self.target) for outcome in candidate.outcomes]
            known = [time for time in times if time is not None]
            found["reached"] = len(known)
            found["seconds"] = interval(known) if known else None
        return found

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
    trials: int = 8,
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
    search = Search(first, target, validation(build(replace(first, method=candidates[0].method)).task), progress)
    for candidate in candidates:
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
    recommended = replace(first, method=best.spec)
    why = reason(best, ranked, build(replace(first, method=best.spec)), target)
    return Choice(tuple(ranked), dropped, measured, recommended, target, seeds, why)


def check(experiment: Experiment, target: float | None, methods: Sequence[str], trials: int, seeds: int) -> None:
    problems = [unknown("method", name, CANDIDATES) for name in methods if name not in CANDIDATES]
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


# ---- tuning -------------------------------------------------------------------------------------
def validation(task: Task) -> Task | None:
    """The task with every fifth sample of each client kept from training, to be tested on; None where shards are too
    small for that."""
    x, y = task.training
    shards = [np.asarray(shard) for shard in task.shards]
    if min(len(shard) for shard in shards) < 2 or sum(len(shard) // HELD_OUT for shard in shards) < 20:
        return None
    kept = np.concatenate([shard[HELD_OUT - 1 :: HELD_OUT] for shard in shards])
    rest = [np.delete(shard, np.arange(HELD_OUT - 1, len(shard), HELD_OUT)) for shard in shards]
    rows = torch.as_tensor(kept)
    return replace(task, data=(x, y), shards=rest, test=(x[rows], y[rows]))


class Search:
    """Trials of all candidates, with one cut for all of them."""

    def __init__(
        self, experiment: Experiment, target: float | None, task: Task | None,
        progress: Callable[[str, Mapping[str, float]], Progress] | None,
    ) -> None:  # fmt: skip
        self.experiment, self.target, self.task, self.progress = experiment, target, task, progress
        self.fastest = math.inf  # virtual seconds to the target, over all trials

    def climb(self, candidate: Candidate, most: int) -> None:
        """Change one option at a time, as long as it helps: rates first, then the cohort, then local steps."""
        if candidate.trials == 0:
            candidate.score = self.trial(candidate, candidate.options)
        for name, factor in self.moves(candidate):
            while candidate.trials < most:
                options = changed(candidate.options, name, factor, self.experiment, candidate.method)
                if options is None:
                    break
                score = self.trial(candidate, options)
                if score >= candidate.score:
                    break
                candidate.options, candidate.score = options, score

    def moves(self, candidate: Candidate) -> list[tuple[str, float]]:
        table = replace(self.experiment, method=candidate.spec).table()["method"]
        server = next((name for name in SERVER if name in table), None)
        cohort = next((name for name in COHORT if table.get(name) is not None), None)
        rate = "client_lr" if "client_lr" in table else server
        moves = [(rate, 0.4), (rate, 2.5)] if rate else []
        moves += [(server, 0.5), (server, 2.0)] if server and server != rate else []
        moves += [(cohort, 0.5), (cohort, 2.0)] if cohort else []
        return moves + ([("local_steps", 0.5), ("local_steps", 2.0)] if "local_steps" in table else [])

    def trial(self, candidate: Candidate, options: Options) -> Score:
        candidate.trials += 1
        until = dict(self.experiment.until)
        if self.target is not None:
            until["accuracy"] = self.target
            if "virtual_seconds" in until:
                until["virtual_seconds"] = min(until["virtual_seconds"], CUT * self.fastest)
        spec = replace(
            self.experiment, method={"name": candidate.method, **options}, task=self.task or self.experiment.task,
            seed=self.experiment.seed + 1000, until=until, evaluate=evaluate(until),
        )  # fmt: skip
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Diverging)  # that a trial diverges is a result
                outcome = run(spec, None, self.shown(f"{candidate.method}, trial {candidate.trials}", until))
        except BadNumbers:
            return 2.0, 0.0
        except ConfigError:
            return 3.0, 0.0
        score = score_of(outcome, self.target)
        if score[0] == 0.0:
            self.fastest = min(self.fastest, max(score[1], 1e-9))
        return score

    def shown(self, label: str, until: Mapping[str, float]) -> Progress | None:
        return None if self.progress is None else self.progress(label, until)

    def final(self, candidate: Candidate, seeds: int) -> None:
        """Run the tuned candidate on the whole task, over seeds."""
        until = dict(self.experiment.until) | ({} if self.target is None else {"accuracy": self.target})
        for seed in range(self.experiment.seed, self.experiment.seed + seeds):
            spec = replace(
                self.experiment, method=candidate.spec, seed=seed, until=until, evaluate=evaluate(until, self.fastest)
            )
            try:
                made = run(spec, None, self.shown(f"{candidate.method}, seed {seed}", until))
            except BadNumbers as error:
                made = error.outcome
            candidate.outcomes.append(made)


def evaluate(until: Mapping[str, float], fastest: float = math.inf) -> dict[str, float]:
    """Often enough to tell times apart, seldom enough to cost little."""
    if "virtual_seconds" in until:
        return {"every_seconds": min(until["virtual_seconds"], 2 * fastest) / LOOKS}
    return {"every_commits": max(1, int(until.get("commits", 10 * LOOKS) / LOOKS))}


def score_of(outcome: Outcome, target: float | None) -> Score:
    at = None if target is None else reached(outcome, target)
    if at is not None:
        return 0.0, at
    seen = [row["accuracy"] for row in outcome.metrics if row["accuracy"] is not None]
    if seen:
        return 1.0, -float(np.mean(seen[-3:]))
    return 1.0, float(outcome.metrics[-1]["loss"])


def reached(outcome: Outcome, target: float) -> float | None:
    at = crossing(outcome.metrics, target)
    return None if at is None else at.virtual_seconds


def changed(options: Options, name: str, factor: float, experiment: Experiment, method: str) -> Options | None:
    """The options with one of them multiplied; None where it cannot be."""
    table = replace(experiment, method={"name": method, **options}).table()["method"]
    value = table.get(name)
    if name == "beta" and value is None:
        value = 1 / table["buffer_size"]
    if name == "local_steps" and value is None:
        value = 10
    if not isinstance(value, int | float):
        return None
    whole = name in (*COHORT, "local_steps")
    new: float = max(1, round(value * factor)) if whole else float(f"{value * factor:.3g}")
    new = min(new, 1.0) if name == "alpha" else new
    made = {**options, name: new}
    if new == value:
        return None
    try:
        build(replace(experiment, method={"name": method, **made}))
    except OffbeatError:
        return None
    return made


def rank(candidate: Candidate, target: float | None) -> tuple[float, float, Score]:
    """Those that were run over seeds come first: all seeds at the target by time, else by accuracy."""
    if not candidate.outcomes:
        return 9.0, 0.0, candidate.score
    scores = [score_of(outcome, target) for outcome in candidate.outcomes]
    worst = max(kind for kind, _ in scores)
    same = [value for kind, value in scores if kind == worst]
    return worst, float(np.mean(same)) if worst else float(np.mean([value for _, value in scores])), candidate.score


# ---- what it says -------------------------------------------------------------------------------
def covered(candidate: Candidate, experiment: Experiment, measured: Measured) -> None:
    """What the theorems say of the options that were chosen."""
    if candidate.method not in THEOREMS:
        candidate.notes.append("no theorem here speaks of it: experience alone")
        return
    spec = replace(experiment, method=candidate.spec)
    own = replace(measured, schedule=theory.schedule_for(measured, spec, candidate.method))
    plan, counsels = theory.advise(own, spec, candidate.method)
    candidate.notes.append(f"theory: {theory.opening(spec, candidate.method, plan, counsels)}")


def reason(best: Candidate, ranked: Sequence[Candidate], built: Built, target: float | None) -> str:
    """Why the first stands first, from what the clock and the runs say."""
    second = next((other for other in ranked[1:] if other.outcomes), None)
    waiting = next((other for other in ranked if other.method in WAITING), None)
    said = []
    spread = float(
        np.quantile(built.fleet.step_seconds, 0.95) / max(np.quantile(built.fleet.step_seconds, 0.05), 1e-12)
    )
    if isinstance(built.method.when, Hybrid):
        said.append("devices of a cluster exchange models over their own links, so fewer reports go to the server")
        if best.method == "async-hl-sgd":
            said.append("and clusters need not wait for one another")
    elif best.method in WAITING:
        if best.idle < 0.25:
            said.append(
                f"clients are nearly alike (idle {best.idle:.0%} in rounds): waiting costs little, nothing is stale"
            )
        else:
            said.append(
                f"its updates are worth more than the waiting costs (clients idle {best.idle:.0%} of the time), and "
                "nothing is stale"
            )
    else:
        other = f", where rounds ({waiting.method}) leave them idle {waiting.idle:.0%} of the time" if waiting else ""
        said.append(
            f"steps of slow clients take {spread:.2g} times as long as those of fast ones; it does not wait for them "
            f"(idle {best.idle:.0%}{other})"
        )
    if second is not None and target is not None:
        one, two = (mean_time(candidate, target) for candidate in (best, second))
        if one is not None and two is not None:
            said.append(f"{second.method} took {two / max(one, 1e-12):.2g} times as long to the target")
        elif one is not None:
            said.append(f"{second.method} did not always reach the target")
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
