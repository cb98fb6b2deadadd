"""A small experiment on the digits: FedBuff, twelve clients, ten commits."""

from __future__ import annotations

from typing import Any

from offbeat import Experiment

TASK = {"name": "digits", "model": "logistic", "clients": 12, "split": "iid"}
FEDBUFF = {"name": "fedbuff", "buffer_size": 3, "local_steps": 2}


def experiment(**given: Any) -> Experiment:
    usual = {"method": FEDBUFF, "task": TASK, "device": "cpu", "until": {"commits": 10}}
    return Experiment(**usual | {"evaluate": {"every_commits": 2}} | given)
