"""Trackers: callbacks that hand a run's config, every evaluation and the result on to a service. Extras install them.

A tracker that fails is left out, and the run goes on (`callbacks.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from offbeat.errors import ConfigError
from offbeat.runs.callbacks import Callback, View


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What of an evaluation is a number; the commit is the step under which it is kept."""
    return {name: value for name, value in row.items() if name != "commit" and isinstance(value, int | float)}


def flat(table: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """A config's values by dotted keys.

    >>> list(flat({"seed": 1, "method": {"name": "fedbuff"}}))
    [('seed', 1), ('method.name', 'fedbuff')]
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{head}{name}.")
        else:
            yield f"{head}{name}", value


def needed(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            [f"this tracker needs the package {extra} ({error}); install it: pip install 'offbeat[{extra}]'"]
        ) from None


def name_of(run: View) -> str:
    return run.directory.name if run.directory else f"{run.method}-{run.task}-seed{run.seed}"


class TensorBoard(Callback):
    """Writes event files that TensorBoard shows, into a folder of its own for each run."""

    def __init__(self, folder: str = "tensorboard") -> None:
        self.make = needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.folder = folder
        self.writer: Any = None

    def began(self, run: View) -> None:
        step = run.commit + 1 if run.rows else None  # a resumed run writes over what came after its checkpoint
        self.writer = self.make(os.path.join(self.folder, name_of(run)), purge_step=step)
        if not run.rows:
            self.writer.add_text("config", f"```\n{json.dumps(run.config, indent=1, default=str)}\n```")

    def evaluated(self, run: View) -> None:
        for name, value in numbers(run.rows[-1]).items():
            self.writer.add_scalar(name, value, run.commit)

    def ended(self, run: View, result: Mapping[str, Any]) -> None:
        self.writer.add_text("result", f"```\n{json.dumps(result, indent=1, default=str)}\n```", run.commit)
        self.writer.close()


class MLflow(Callback):
    """A run of an MLflow experiment. `uri` None is what MLFLOW_TRACKING_URI says, or MLflow's default."""

    def __init__(self, experiment: str = "offbeat", uri: str | None = None) -> None:
        self.mlflow = needed("mlflow", "mlflow")
        self.experiment, self.uri = experiment, uri
        self.client: Any = None
        self.run: str | None = None

    def began(self, run: View) -> None:
        self.client = self.mlflow.MlflowClient(self.uri)
        if self.run is not None:
            self.client.update_run(self.run, "RUNNING")
            return
        there = self.client.get_experiment_by_name(self.experiment)
        home = there.experiment_id if there else self.client.create_experiment(self.experiment)
        self.run = self.client.create_run(home, run_name=name_of(run)).info.run_id
        for name, value in flat(run.config):
            self.client.log_param(self.run, name, str(value)[:500])

    def evaluated(self, run: View) -> None:
        entities = self.mlflow.entities
        now = int(1000 * run.wall_seconds)
        metrics = [entities.Metric(name, value, now, run.commit) for name, value in numbers(run.rows[-1]).items()]
        self.client.log_batch(self.run, metrics=metrics)

    def ended(self, run: View, result: Mapping[str, Any]) -> None:
        self.client.set_tag(self.run, "ended", str(result["ended"])[:500])
        stopped = str(result["ended"]).startswith(("stopped", "interrupted"))
        self.client.set_terminated(self.run, "FAILED" if stopped else "FINISHED")

    def state(self) -> Mapping[str, Any]:
        return {"run": self.run}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.run = state["run"]


class WeightsAndBiases(Callback):
    """A run of Weights & Biases; offline unless told otherwise: `wandb sync` sends it later."""

    def __init__(self, project: str = "offbeat", folder: str | None = None, mode: str = "offline") -> None:
        self.wandb = needed("wandb", "wandb")
        self.project, self.folder, self.mode = project, folder, mode
        self.id: str | None = None
        self.run: Any = None

    def began(self, run: View) -> None:
        self.run = self.wandb.init(
            project=self.project, dir=self.folder, mode=self.mode, id=self.id, name=name_of(run), resume="allow",
            config=dict(flat(run.config)), settings=self.wandb.Settings(silent=True, disable_git=True),
        )  # fmt: skip
        self.id = self.run.id

    def evaluated(self, run: View) -> None:
        self.run.log(numbers(run.rows[-1]), step=run.commit)

    def ended(self, run: View, result: Mapping[str, Any]) -> None:
        self.run.summary["ended"] = str(result["ended"])
        self.run.finish()

    def state(self) -> Mapping[str, Any]:
        return {"id": self.id}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.id = state["id"]
