"""A brief search for options: one at a time, as long as it helps, judged by held-out samples as all trials are.

Trials of all methods share one cut: none goes on for longer than a few times what the best one so far took. `tuning.py`
looks for the best options of methods that somebody named, each with the same budget, and needs Optuna, which is an
extra. This search serves `offbeat choose`, which comes without extras: it spends its trials on the methods that lead,
and none on options that the theory or the clock rules out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.errors import BadNumbers, ConfigError, Diverging, OffbeatError
from offbeat.experiments.assemble import build
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import run
from offbeat.runs.outcome import Outcome
from offbeat.runs.progress import Progress
from offbeat.runs.target import crossing
from offbeat.studies.trials import Aim, judging, mean_of_last

SERVER = ("server_lr", "beta", "alpha")  # what a method calls the server's rate, the first that it has
COHORT = ("n", "buffer_size")
HELD_OUT = 0.2  # of every shard, for judging alone
LEAST_HELD = 20  # samples that judge
CUT = 2.5  # a trial ends after so many times what the best took
LOOKS = 120  # evaluations within the budget
Options = dict[str, Any]
Score = tuple[float, float]  # the less the better: (0, seconds to the target), (1, -accuracy), (2, 0) where it diverged


@dataclass
class Candidate:
    """A method on its way through the choice."""

    method: str
    options: Options = field(default_factory=dict)  # the best so far
    score: Score = (3.0, 0.0)
    trials: int = 0
    seen: list[Options] = field(default_factory=list)  # options that were tried
    rows: list[dict[str, Any]] = field(default_factory=list)  # the evaluations of the newest trial
    best_rows: list[dict[str, Any]] = field(default_factory=list)  # those of the best so far
    outcomes: list[Outcome] = field(default_factory=list)  # of the final runs, one per seed
    notes: list[str] = field(default_factory=list)
    idle: float = 0.0
    commits: int = 0

    @property
    def spec(self) -> Options:
        return {"name": self.method, **self.options}


def judged(experiment: Experiment, target: float | None) -> Experiment:
    """The experiment as a trial runs it: judged by a fifth of every shard. Times to the target are not smoothed, which
    would favour methods with many small commits."""
    return judging(experiment, HELD_OUT, Aim(target=target, smooth=1))


def require_judges(experiment: Experiment) -> None:
    """An error where shards are too small for a fifth of each to judge: the test set is not for that."""
    held = sum(len(part) for part in build(judged(experiment, None)).task.held_out or ())
    if held < LEAST_HELD:
        raise ConfigError(
            [f"a fifth of every client's shard is {held} samples in all, and options are judged by {LEAST_HELD} at "
             "least, none of them from the test set; give clients more samples (a task with fewer clients), or run the "
             "options that you have in mind with `offbeat compare`"]
        )  # fmt: skip


class Search:
    """Trials of all candidates, with one cut for all of them."""

    def __init__(
        self, experiment: Experiment, target: float | None,
        progress: Callable[[str, Mapping[str, float]], Progress] | None = None,
    ) -> None:  # fmt: skip
        self.experiment, self.target, self.progress = experiment, target, progress
        self.fastest = math.inf  # virtual seconds to the target, over all trials
        self.horizon = math.inf  # virtual seconds of a trial, while nobody has reached the target

    def open(self, candidates: Sequence[Candidate]) -> None:
        """One trial of each: with a target, for an eighth of the budget, and for twice as long until one reaches it."""
        budget = self.experiment.until.get("virtual_seconds", math.inf)
        self.horizon = budget / 8 if self.target is not None else math.inf
        while True:
            for candidate in candidates:
                candidate.score = self.trial(candidate, candidate.options)
                candidate.best_rows = candidate.rows
            if self.fastest < math.inf or not self.horizon < budget:
                self.horizon = math.inf
                return
            self.horizon *= 2

    def climb(self, candidate: Candidate, most: int) -> None:
        """Change one option at a time, as long as it helps: rates first, then the cohort, rates more finely, and local
        steps. What was tried before is not tried again."""
        for name, factor in self.moves(candidate):
            while len(candidate.seen) < most:
                options = changed(candidate.options, name, factor, self.experiment, candidate.method)
                if options is None or options in candidate.seen:
                    break
                score = self.trial(candidate, options)
                candidate.score = self.standing(candidate)
                if score >= candidate.score:
                    break
                candidate.options, candidate.score, candidate.best_rows = options, score, candidate.rows

    def standing(self, candidate: Candidate) -> Score:
        """The score of the best so far, as it would be if its trial had ended where trials end now: what it came to
        after a longer time, be it the target, is no better."""
        rows = [row for row in candidate.best_rows if row["virtual_seconds"] <= self.seconds]
        return score_of(rows, self.target) if candidate.score[0] < 2.0 and rows else candidate.score

    @property
    def seconds(self) -> float:
        """The virtual seconds after which a trial ends."""
        budget = self.experiment.until.get("virtual_seconds", math.inf)
        return budget if self.target is None else min(budget, self.horizon, CUT * self.fastest)

    def moves(self, candidate: Candidate) -> list[tuple[str, float]]:
        table = replace(self.experiment, method=candidate.spec).table()["method"]
        server = next((name for name in SERVER if name in table), None)
        cohort = next((name for name in COHORT if table.get(name) is not None), None)
        rate = "client_lr" if "client_lr" in table else server
        moves = [(rate, 3.0), (rate, 0.33)] if rate else []
        moves += [(server, 0.5), (server, 2.0)] if server and server != rate else []
        moves += [(cohort, 0.5), (cohort, 2.0)] if cohort else []
        moves += [(rate, 1.6), (rate, 0.62)] if rate else []
        return moves + ([("local_steps", 0.5), ("local_steps", 2.0)] if "local_steps" in table else [])

    def trial(self, candidate: Candidate, options: Options) -> Score:
        candidate.trials += 1
        candidate.seen += [] if options in candidate.seen else [options]
        until = dict(self.experiment.until)
        if self.target is not None:
            until["accuracy"] = self.target
            if "virtual_seconds" in until:
                until["virtual_seconds"] = self.seconds
        spec = replace(
            self.experiment, method={"name": candidate.method, **options}, seed=self.experiment.seed + 1000,
            until=until, evaluate=self.evaluate(until),
        )  # fmt: skip
        try:
            outcome = self.run(judged(spec, self.target), f"{candidate.method}, trial {candidate.trials}", until)
        except BadNumbers:
            return 2.0, 0.0
        except ConfigError:
            return 3.0, 0.0
        candidate.rows = outcome.metrics
        score = score_of(outcome.metrics, self.target)
        if score[0] == 0.0:
            self.fastest = min(self.fastest, max(score[1], 1e-9))
        return score

    def run(self, spec: Experiment, label: str, until: Mapping[str, float]) -> Outcome:
        shown = None if self.progress is None else self.progress(label, until)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Diverging)  # that a run diverges is a result
            return run(spec, None, shown)

    def final(self, candidate: Candidate, seeds: int) -> None:
        """Run the tuned candidate on the whole task, over seeds."""
        until = dict(self.experiment.until) | ({} if self.target is None else {"accuracy": self.target})
        for seed in range(self.experiment.seed, self.experiment.seed + seeds):
            spec = replace(
                self.experiment, method=candidate.spec, seed=seed, until=until,
                evaluate=self.evaluate(until, self.fastest),
            )  # fmt: skip
            try:
                made = self.run(spec, f"{candidate.method}, seed {seed}", until)
            except BadNumbers as error:
                made = error.outcome
            candidate.outcomes.append(made)

    def evaluate(self, until: Mapping[str, float], fastest: float = math.inf) -> dict[str, Any]:
        """What the experiment looks at, often enough to tell times apart and seldom enough to cost little."""
        looks = {name: value for name, value in self.experiment.evaluate.items() if not name.startswith("every_")}
        if "virtual_seconds" in until:
            return {**looks, "every_seconds": float(f"{min(until['virtual_seconds'], 2 * fastest) / LOOKS:.3g}")}
        return {**looks, "every_commits": max(1, int(until.get("commits", 10 * LOOKS) / LOOKS))}


def score_of(rows: Sequence[Mapping[str, Any]], target: float | None) -> Score:
    at = None if target is None else crossing(rows, target)
    if at is not None:
        return 0.0, at.virtual_seconds
    accuracy = mean_of_last(rows, "accuracy")
    return 1.0, float(rows[-1]["loss"]) if accuracy is None else -accuracy


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
