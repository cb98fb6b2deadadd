"""Which options are tried next: ranges and choices, spread over at first, then where Optuna's TPE expects more."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.config import registry, toml
from offbeat.errors import ConfigError, in_words
from offbeat.experiments.experiment import split_name
from offbeat.studies.tuning_ledger import Entry

WIDE = {"client_lr": (0.001, 3.0), "server_lr": (0.01, 3.0)}  # where rates are looked for, unless somebody says
GENERATION = 4  # trials that Optuna proposes at once
OFFERS = 4  # for each of them
GOOD = 4  # of so many trials Optuna takes one for good
APART = 1 / 50  # of a range, by powers: two trials are not nearer to one another, if Optuna offers others


@dataclass(frozen=True)
class Between:
    """A number from a range, by powers."""

    low: float
    high: float


Space = Mapping[str, Between | Sequence[Any]]


def parse_search(texts: Sequence[str]) -> dict[str, Between | list[Any]]:
    """From `name=low..high` and `name=a,b,c`.

    >>> parse_search(["client_lr=0.01..1", "local_steps=5,10"])
    {'client_lr': Between(low=0.01, high=1.0), 'local_steps': [5, 10]}
    """
    ranges: dict[str, Between | list[Any]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        low, dots, high = given.partition("..")
        try:
            ranges[name.strip()] = (
                Between(float(low), float(high))
                if dots
                else [toml.parse_value(each.strip()) for each in given.split(",")]
            )
        except ValueError:
            given = ""
        if not name.strip() or not given:
            raise ConfigError(
                [f"--search {text}; write client_lr=0.01..1 for a range or local_steps=5,10,20 for a choice"]
            )
    return ranges


def space_of(method: Any, search: Space) -> dict[str, Between | Sequence[Any]]:
    """What is tuned of a method: what was asked for and it has, else its rate."""
    name, fixed = split_name("method", method)
    parameters = inspect.signature(registry.find("method", name)).parameters
    asked = {key: value for key, value in search.items() if key in parameters}
    if not asked:
        rate = "client_lr" if "client_lr" in parameters else "server_lr"
        if rate not in parameters:
            raise ConfigError([f"{name} has no rate to tune; name options of it (--search)"])
        asked = {rate: Between(*WIDE[rate])}
    both = [key for key in asked if key in fixed]
    problems = [f"{name}: {key} = {in_words(fixed[key])} is set and cannot be searched as well" for key in both]
    for key, values in asked.items():
        if isinstance(values, Between) and not 0 < values.low < values.high < math.inf:
            problems.append(
                f"--search {key}: {values.low}..{values.high}; give two positive numbers, the smaller first"
            )
    if problems:
        raise ConfigError(problems)
    return asked


def method_options(method: Any) -> list[str]:
    return list(inspect.signature(registry.find("method", split_name("method", method)[0])).parameters)


def proposed(space: Mapping[str, Any], done: Sequence[Entry], trials: int, seed: int) -> list[dict[str, Any]]:
    """The next generation: half of all trials spread evenly over the ranges, the rest by Optuna's TPE from what is
    known. Optuna is told the order of trials: by their mean score, then those that were cut off, then failures."""
    optuna = needed_optuna()
    first = max(1, math.ceil(trials / 2))
    if not done:
        return [spread_over(space, number, first) for number in range(first)]
    spaces = {key: distribution(optuna, values) for key, values in space.items()}
    order = sorted(done, key=lambda e: (e.score is None, e.cut, -(e.score or 0.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some of its options are experimental
        sampler = optuna.samplers.TPESampler(
            seed=seed % 2**32 + len(done), n_startup_trials=1, constant_liar=True, gamma=lambda n: math.ceil(n / GOOD)
        )
        study = optuna.create_study(direction="minimize", sampler=sampler)
        for rank, entry in enumerate(order):
            study.add_trial(optuna.trial.create_trial(params=entry.options, distributions=spaces, value=float(rank)))
        known, many = [entry.options for entry in done], min(GENERATION, trials - len(done))
        offers = [dict(study.ask(spaces).params) for _ in range(OFFERS * many)]
    chosen: list[dict[str, Any]] = []
    for offer in offers:
        if len(chosen) < many and not any(alike(space, offer, other) for other in [*known, *chosen]):
            chosen.append(offer)
    return chosen + [offer for offer in offers if offer not in chosen][: many - len(chosen)]


def alike(space: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two trials are too near to one another to say more than one of them."""
    for key, values in space.items():
        if not isinstance(values, Between):
            if one[key] != other[key]:
                return False
        elif abs(math.log(one[key] / other[key])) > APART * math.log(values.high / values.low):
            return False
    return True


def spread_over(space: Mapping[str, Any], number: int, many: int) -> dict[str, Any]:
    """Trial `number` of `many`: ranges in the middle of equal parts, by powers; of choices each in turn."""
    options: dict[str, Any] = {}
    for place, (key, values) in enumerate(space.items()):
        if isinstance(values, Between):
            part = ((number * (1 if place == 0 else 5 + 2 * place)) % many + 0.5) / many
            options[key] = values.low * (values.high / values.low) ** part
        else:
            options[key] = values[number % len(values)]
    return options


def distribution(optuna: Any, values: Any) -> Any:
    if isinstance(values, Between):
        return optuna.distributions.FloatDistribution(values.low, values.high, log=True)
    return optuna.distributions.CategoricalDistribution(list(values))


def needed_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(["tuning needs Optuna; install it: pip install 'offbeat[tune]'"]) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
