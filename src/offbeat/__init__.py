"""Offbeat trains one model over many clients that keep no common time."""

from offbeat.assemble import build
from offbeat.compare import Comparison, compare
from offbeat.config import Experiment
from offbeat.errors import ConfigError, OffbeatError, StorageError
from offbeat.experiment import replay, resume, run
from offbeat.fleets.fleet import Fleet
from offbeat.method import Cohort, Job, Local, Method, Policy, Rule
from offbeat.methods import METHODS
from offbeat.runs.repeat import ReplayDiffers
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from offbeat.tasks.task import Task

__all__ = [
    "METHODS",
    "Buffer",
    "Cohort",
    "Comparison",
    "ConfigError",
    "Experiment",
    "Fleet",
    "Job",
    "Local",
    "Method",
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
    "replay",
    "resume",
    "run",
]
__version__ = "0.1.0"
