"""Offbeat trains one model over many clients that keep no common time.

The public names are imported when they are first used, so that `import offbeat` and its light modules (the schedule,
the contract, the command line's help) do not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.errors import ConfigError, OffbeatError, ReplayDiffers, StorageError
    from offbeat.experiments.assemble import build
    from offbeat.experiments.experiment import Experiment
    from offbeat.experiments.running import replay, resume, run
    from offbeat.fleets.fleet import Fleet
    from offbeat.method import Cohort, Job, Local, Method, Policy, Rule
    from offbeat.methods import METHODS
    from offbeat.numerics.metrics import METRICS, Metric, metric
    from offbeat.numerics.windows import windows
    from offbeat.runs.callbacks import Callback
    from offbeat.schedule.buffer import Buffer
    from offbeat.schedule.rounds import Rounds
    from offbeat.schedule.sampled import Sampled
    from offbeat.studies.comparison import Comparison, compare
    from offbeat.tasks.task import Task

__all__ = [
    "METHODS",
    "METRICS",
    "Buffer",
    "Callback",
    "Cohort",
    "Comparison",
    "ConfigError",
    "Experiment",
    "Fleet",
    "Job",
    "Local",
    "Method",
    "Metric",
    "OffbeatError",
    "Policy",
    "ReplayDiffers",
    "Rounds",
    "Rule",
    "Sampled",
    "StorageError",
    "Task",
    "build",
    "compare",
    "metric",
    "replay",
    "resume",
    "run",
    "windows",
]
__version__ = "0.1.0"

_HOMES = {
    "experiments.assemble": ("build",),
    "studies.comparison": ("Comparison", "compare"),
    "experiments.experiment": ("Experiment",),
    "errors": ("ConfigError", "OffbeatError", "ReplayDiffers", "StorageError"),
    "experiments.running": ("replay", "resume", "run"),
    "fleets.fleet": ("Fleet",),
    "method": ("Cohort", "Job", "Local", "Method", "Policy", "Rule"),
    "methods": ("METHODS",),
    "numerics.metrics": ("METRICS", "Metric", "metric"),
    "numerics.windows": ("windows",),
    "runs.callbacks": ("Callback",),
    "schedule.buffer": ("Buffer",),
    "schedule.rounds": ("Rounds",),
    "schedule.sampled": ("Sampled",),
    "tasks.task": ("Task",),
}
_HOME = {name: f"offbeat.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute '{name}'")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next look finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
