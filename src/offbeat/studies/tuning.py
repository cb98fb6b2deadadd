"""Honest tuning: rates and sizes of several methods, each with the same budget, by what a held-out part says.

Trials (`trials.py`) go in generations: first spread over the ranges, then where Optuna expects more. Every trial is run
with the first seed, those that do well with the others too; the best few are run again with fresh seeds, and the mean
over all seeds decides. What a generation is rests on the ledger alone, so that tuning can be broken off and taken up,
and gives the same on any number of workers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from offbeat.config.options import fits
from offbeat.errors import ConfigError, OffbeatError, in_words, unknown
from offbeat.experiments.assemble import build
from offbeat.experiments.experiment import Experiment, split_name
from offbeat.numerics.evaluation import Figure
from offbeat.runs.disk import text_digest
from offbeat.studies.proposals import Between, Space, method_options, proposed, space_of
from offbeat.studies.trials import LEAST, Aim, Heat, Tried, grouped, judging, run_heat
from offbeat.studies.tuning_ledger import Entry, Ledger

NEAR = 1.25  # times the best seconds to the target with the first seed that let a trial go on to the other seeds
OTHER = 2.0  # times the best seconds with the first seed that the others may take, while nothing is known of them
FINALISTS = 3
CLOSE = 1.1  # times the best mean seconds that make a finalist
PARTS = (0.0625, 0.125, 0.25, 0.5, 1.0)  # of the budget, for the first trials, until one of them reaches the target

Heats = Generator[list[Heat], list[list[Tried]], list[Tried]]  # asks for heats, is sent what they came to


@dataclass(frozen=True)
class Tuned:
    """The best options of each label and their score (seconds to a target are negative), and all trials."""

    best: dict[str, dict[str, Any]]
    scores: dict[str, float]
    entries: list[Entry]
    aim: Aim
    seconds: float

    def trials(self, label: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.label == label and not entry.fresh]


def tune(
    experiments: Mapping[str, Experiment], search: Space | None = None, by: str | None = None,
    target: float | None = None, trials: int = 16, seeds: Sequence[int] = (0, 1, 2), hold_out: float = 0.2,
    out: str | Path | None = None, resume: bool = False, company: bool = True,
    tell: Callable[[str, int, int], None] | None = None, workers: int | None = None, address: str | None = None,
) -> Tuned:  # fmt: skip
    """Look for the best options of every experiment's method, with the same budget (`until`, `trials`, `seeds`) each.

    `by` is any metric of the runs (None: the accuracy, or the loss), judged at the end of the budget or, with a
    `target`, by the virtual time until the mean of five evaluations meets it, on `hold_out` of every client's shard.
    The best few are run again with fresh seeds. `out` keeps a ledger, from which `resume` goes on, and `tuned.toml`,
    which `offbeat compare --tuned` takes. With `workers` so many heats of trials go on side by side on a Ray cluster
    (`address`, or one that is started here).
    """
    if trials < 1 or not seeds:
        raise ConfigError([f"trials = {trials}, seeds = {list(seeds)}; give at least one of each"])
    began = time.perf_counter()
    spaces = {label: space_of(e.method, search or {}) for label, e in experiments.items()}
    if unused := [key for key in search or {} if not any(key in space for space in spaces.values())]:
        known = {key for e in experiments.values() for key in method_options(e.method)}
        raise ConfigError([f"--search: {unknown('option of these methods', unused[0], known)}"])
    aim = aim_of(next(iter(experiments.values())), by, target, hold_out)
    judged = {label: judging(experiment, hold_out, aim) for label, experiment in experiments.items()}
    for experiment in judged.values():
        build(experiment)
    facts = [{label: e.table() for label, e in judged.items()}, asdict(aim), trials, list(seeds), spaces]
    key = text_digest(json.dumps(facts, default=str))
    with Ledger(None if out is None else Path(out), key, resume) as ledger:
        searches = {
            label: MethodSearch(label, experiment, spaces[label], aim, trials, list(seeds), ledger, company, tell)
            for label, experiment in judged.items()
        }
        if workers is None:
            for search_one in searches.values():
                conduct([search_one.heats()], lambda heats: [run_heat(heat) for heat in heats])
        else:
            from offbeat.studies.spread import connected

            device = next(iter(judged.values())).device
            with connected(workers, address):
                conduct(
                    [search_one.heats() for search_one in searches.values()],
                    lambda heats: run_side_by_side(heats, workers, address, device),
                )
        chosen = {label: search_one.choice() for label, search_one in searches.items()}
        best = {label: dict(entry.options) for label, (entry, _) in chosen.items()}
        where = f"{aim.metric} on the held-out part of every shard ({hold_out:.0%})"
        what = where if target is None else f"time to {target} of {where}"
        ledger.close(experiments, best, f"Tuned by {what}; {trials} trials of each method, seeds {list(seeds)}.")
    scores = {label: score for label, (_, score) in chosen.items()}
    return Tuned(best, scores, ledger.entries, aim, time.perf_counter() - began)


def run_side_by_side(heats: Sequence[Heat], workers: int, address: str | None, device: str) -> list[list[Tried]]:
    from offbeat.studies.spread import Call, spread

    calls = [Call(heat.name, run_heat, (heat,)) for heat in heats]
    results = dict(spread(calls, workers, address, device, "tuning"))
    return [results[place] for place in range(len(calls))]


def conduct(
    searches: Sequence[Generator[list[Heat], list[list[Tried]], None]],
    run_heats: Callable[[list[Heat]], list[list[Tried]]],
) -> None:
    """Run what all searches ask for, together, and answer each, until none asks any more."""
    asking: list[tuple[Generator[list[Heat], list[list[Tried]], None], list[Heat]]] = []
    for search in searches:
        if (first := next(search, None)) is not None:
            asking.append((search, first))
    while asking:
        results = iter(run_heats([heat for _, heats in asking for heat in heats]))
        before, asking = asking, []
        for search, heats in before:
            try:
                asking.append((search, search.send([next(results) for _ in heats])))
            except StopIteration:
                continue


def aim_of(experiment: Experiment, by: str | None, target: float | None, hold_out: float) -> Aim:
    """The aim, if the runs have such a metric and it has a better side."""
    if not fits(hold_out, float) or not 0 < hold_out < 1:
        raise ConfigError([f"hold_out = {in_words(hold_out)}; it is the share of every shard that judges, such as 0.2"])
    built = build(judging(experiment, hold_out, Aim()))
    figures: Mapping[str, Figure] = built.engine().figures
    name = by or ("accuracy" if built.task.has_accuracy else "loss")
    if name not in figures:
        raise ConfigError([f"--by: {unknown('metric', name, figures)}"])
    if figures[name].more_is_better is None:
        raise ConfigError([f"--by {name}: nobody said whether more of it is better; say it (more_is_better)"])
    return Aim(name, bool(figures[name].more_is_better), target)


@dataclass
class MethodSearch:
    """The trials of one method."""

    label: str
    experiment: Experiment
    space: Mapping[str, Between | Sequence[Any]]
    aim: Aim
    trials: int
    seeds: list[int]
    ledger: Ledger
    company: bool
    tell: Callable[[str, int, int], None] | None

    def heats(self) -> Generator[list[Heat], list[list[Tried]], None]:
        """Ask for all heats, generation by generation, and write down what they came to."""
        while len(done := self.ledger.trials(self.label)) < self.trials:
            if self.tell is not None:
                self.tell(self.label, len(done), self.trials)
            options = proposed(self.space, done, self.trials, self.experiment.seed)
            firsts = yield from self.first_seed(options, done)
            going = self.going_on(firsts, done)
            times = [at for one in firsts if (at := self.aim.seconds(one.rows)) is not None]
            known = [
                min(self.fastest(n, done), OTHER * min(times, default=math.inf)) for n in range(1, len(self.seeds))
            ]
            others = yield from self.run_with(self.seeds[1:], [options[place] for place in going], known)
            results = [[one] for one in firsts]
            for place, more in zip(going, others, strict=True):
                results[place] += more
            self.note(range(len(done), len(done) + len(options)), options, results, len(self.seeds))
        finalists = self.finalists()
        if len(finalists) > 1 and not self.ledger.trials(self.label, fresh=True):
            if self.tell is not None:
                self.tell(self.label, self.trials - 1, self.trials)
            options = [entry.options for entry in finalists]
            results = yield from self.run_with(self.fresh_seeds, options, [math.inf] * len(self.fresh_seeds))
            self.note([entry.number for entry in finalists], options, results, len(self.fresh_seeds), fresh=True)

    @property
    def fresh_seeds(self) -> list[int]:
        return [max(self.seeds) + n for n in range(1, max(2, len(self.seeds)))]

    def runs(self, options: Sequence[dict[str, Any]], seed: int) -> list[Experiment]:
        name, fixed = split_name("method", self.experiment.method)
        return [replace(self.experiment, method={"name": name, **fixed, **each}, seed=seed) for each in options]

    def first_seed(self, options: Sequence[dict[str, Any]], done: Sequence[Entry]) -> Heats:
        """All trials of a generation with the first seed. While no time to the target is known that could cut them off,
        trials that do not go together get a part of the budget first."""
        experiments, best = self.runs(options, self.seeds[0]), self.fastest(0, done)
        groups = grouped(experiments, self.company)
        parts = PARTS if self.aim.target is not None and best == math.inf and len(groups) > 1 else (1.0,)
        for part in parts:
            short = [replace(each, until=part_of(each.until, part)) for each in experiments]
            heats = [Heat(tuple(short[n] for n in group), self.aim, best, part == 1) for group in groups]
            results = yield heats
            tried = {n: one for group, many in zip(groups, results, strict=True)
                     for n, one in zip(group, many, strict=True)}  # fmt: skip
            if any(self.aim.seconds(one.rows) is not None for one in tried.values()):
                break
        for one in tried.values():
            one.cut |= part < 1 and self.aim.seconds(one.rows) is None
        return [tried[place] for place in range(len(options))]

    def going_on(self, firsts: Sequence[Tried], done: Sequence[Entry]) -> list[int]:
        """Which trials of a generation are worth the other seeds: those of the better half of all with the first."""
        scores = {
            n: score for n, one in enumerate(firsts) if not one.cut and (score := self.aim.score(one)) is not None
        }
        known = [entry.scores[0] for entry in done if entry.scores[0] is not None and not entry.cut]
        order = sorted([*known, *scores.values()], reverse=True)
        if not order:
            return []
        many = max(LEAST, math.ceil((len(done) + len(firsts)) / 2))
        least = order[:many][-1]
        if self.aim.target is not None and self.aim.reached(order[0]):
            least = max(least, NEAR * order[0])
        return [n for n, score in scores.items() if score >= least]

    def run_with(
        self, seeds: Sequence[int], options: Sequence[dict[str, Any]], best: Sequence[float]
    ) -> Generator[list[Heat], list[list[Tried]], list[list[Tried]]]:
        """These options with each of these seeds, for which these times to the target are known."""
        trials: list[list[Tried]] = [[] for _ in options]
        heats, places = [], []
        for seed, known in zip(seeds, best, strict=True):
            experiments = self.runs(options, seed)
            for group in grouped(experiments, self.company):
                heats.append(Heat(tuple(experiments[n] for n in group), self.aim, known, False))
                places.append(group)
        if heats:
            results = yield heats
            for group, many in zip(places, results, strict=True):
                for place, one in zip(group, many, strict=True):
                    trials[place].append(one)
        return trials

    def fastest(self, number: int, done: Sequence[Entry]) -> float:
        """The least seconds to the target with a seed, as far as is known."""
        scores = [entry.scores[number] for entry in done if len(entry.scores) > number]
        times = [-score for score in scores if score is not None and self.aim.reached(score)]
        return min(times, default=math.inf) if self.aim.target is not None else math.inf

    def note(
        self, numbers: Sequence[int], options: Sequence[dict[str, Any]], results: Sequence[Sequence[Tried]], seeds: int,
        fresh: bool = False,
    ) -> None:  # fmt: skip
        entries = []
        for number, each, trials in zip(numbers, options, results, strict=True):
            said = next((one.failed for one in trials if one.failed), None)
            cut = not said and (len(trials) < seeds or any(one.cut for one in trials))
            scores, seconds = [self.aim.score(one) for one in trials], sum(one.seconds for one in trials)
            entries.append(Entry(self.label, number, each, scores, cut, trials[0].company, seconds, said, fresh))
        self.ledger.add(entries)

    def complete(self) -> list[Entry]:
        """The trials that were run with all seeds, from the best on; if there is none, those with the most seeds."""
        there = [entry for entry in self.ledger.trials(self.label) if entry.score is not None]
        whole = [entry for entry in there if not entry.cut]
        return sorted(whole or there, key=lambda entry: (-len(entry.scores), -(entry.score or 0.0)))

    def finalists(self) -> list[Entry]:
        """The best few, if there is a doubt between them."""
        few = self.complete()[:FINALISTS]
        best = few[0].score if few else None
        if best is None or self.aim.target is None or not self.aim.reached(best):
            return few
        return [entry for entry in few if entry.score is not None and entry.score >= CLOSE * best]

    def choice(self) -> tuple[Entry, float]:
        """The best trial and its score: the mean over all seeds, of those that were run with fresh ones."""
        there = {entry.number: entry for entry in self.complete()}
        if not there:
            raise OffbeatError(
                f"every trial of {self.label} failed; search lower rates (--search client_lr=0.0001..0.01)"
            )
        again = [entry for entry in self.ledger.trials(self.label, fresh=True) if entry.score is not None]
        if not again:
            best = next(iter(there.values()))
            return best, best.score or 0.0
        scores = {entry.number: [*entry.scores, *there[entry.number].scores] for entry in again}
        means = {number: fmean(score for score in each if score is not None) for number, each in scores.items()}
        number = max(means, key=lambda each: means[each])
        return there[number], means[number]


def part_of(until: Mapping[str, float], part: float) -> dict[str, float]:
    """A part of what may be spent."""
    spent = ("commits", "virtual_seconds", "samples", "bytes_up", "bytes_down", "bytes_d2d")
    whole = ("commits", "samples")
    share = {name: max(1, math.ceil(until[name] * part)) if name in whole else until[name] * part
             for name in spent if name in until}  # fmt: skip
    return {**until, **share}
