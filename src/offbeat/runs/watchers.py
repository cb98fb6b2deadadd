"""Callbacks by name: those that ship, and trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.config import registry
from offbeat.config.options import option_problems
from offbeat.errors import ConfigError, in_words
from offbeat.runs.callbacks import Callback, EarlyStopping, KeepBest, TimeLimit
from offbeat.runs.trackers import MLflow, TensorBoard, WeightsAndBiases

CALLBACKS: dict[str, Callable[..., Callback]] = {
    "early-stopping": EarlyStopping,
    "keep-best": KeepBest,
    "time-limit": TimeLimit,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def callbacks_of(asked: Sequence[Any]) -> list[Callback]:
    """Callbacks from names, tables with a name and options, and objects."""
    callbacks: list[Callback] = []
    problems: list[str] = []
    for given in asked:
        if isinstance(given, Callback):
            callbacks.append(given)
            continue
        table = {"name": given} if isinstance(given, str) else given
        if not isinstance(table, Mapping) or "name" not in table:
            problems.append(
                f"callbacks has {in_words(given)}; give a name (`offbeat list callbacks`) or a table with one"
            )
            continue
        name, options = str(table["name"]), {key: value for key, value in table.items() if key != "name"}
        try:
            wrong = option_problems(f"callback '{name}'", registry.find("callback", name), options)
            problems += wrong
            if not wrong:
                callbacks.append(registry.make("callback", name, **options))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return callbacks
