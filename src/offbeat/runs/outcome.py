"""What a run came to: its figures, as a result, as rows and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from offbeat.numerics.evaluation import Figure
from offbeat.runs.account import Account
from offbeat.runs.columns import metrics_table
from offbeat.runs.layout import page_table
from offbeat.runs.report import comparison_table
from offbeat.runs.target import Crossing, crossing, target_of


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the figures (`result`, each also an attribute), one row per evaluation (`metrics`), and the
    model by parameter name, as `load_state_dict` takes it."""

    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    model: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        r = self.result
        score = "" if r["accuracy_final"] is None else f", accuracy {r['accuracy_final']:.4f}"
        loss = "" if r["loss_final"] is None else f", loss {r['loss_final']:.4g}"
        return f"Outcome({r['method']} on {r['task']}: {r['commits']} commits{score}{loss}; {r['ended']})"

    def _repr_html_(self) -> str:
        table = comparison_table({self.result["method"]: [self.result]}, next(iter(self.result["reached"]), None))
        return page_table(table.columns, table.rows, f"{self.result['task']} on {self.result['fleet']}")

    def frame(self) -> Any:
        """The evaluations as a table: a pandas DataFrame where pandas is there, else an Arrow table."""
        return frame(self.metrics)

    def plot(self, metric: str | None = None, against: str = "time", target: float | None = None) -> Any:
        """A Matplotlib figure of a metric against time, commits, samples, bytes or d2d."""
        from offbeat.runs.curves import drawn  # Matplotlib is loaded when something is drawn

        return drawn({self.result["method"]: [self]}, metric, against, target)

    def reaching(self, target: str | None) -> dict[str, Any]:
        """The result; when it reached this target stands there, though the run's config did not name it."""
        return reaching(self.result, self.metrics, target)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["result"][name]
        except KeyError:
            raise AttributeError(name) from None


def frame(rows: list[dict[str, Any]]) -> Any:
    table = metrics_table(rows)
    return table if find_spec("pandas") is None else table.to_pandas()


def row_of(a: Account, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the metrics: what was spent, and what an evaluation found."""
    updates = sum(a.staleness.values())
    row = {
        "commit": a.commits,
        "virtual_seconds": a.time,
        "accuracy": metrics["accuracy"],
        "loss": metrics["loss"],
        "client_steps": a.client_steps,
        "samples": a.samples,
        "bytes_up": round(a.bytes_up),
        "bytes_down": round(a.bytes_down),
        "bytes_d2d": round(a.bytes_d2d),
        "staleness_mean": sum(k * n for k, n in a.staleness.items()) / updates if updates else 0.0,
    }
    return row | {name: value for name, value in metrics.items() if name not in row}


def reached(
    metrics: Sequence[Mapping[str, Any]], name: str, target: float, smooth: int, figures: Mapping[str, Figure]
) -> dict[str, Any] | None:
    more = name not in figures or bool(figures[name].more_is_better)
    return moment(crossing(metrics, target, smooth, name, more))


def moment(at: Crossing | None) -> dict[str, Any] | None:
    """When a target was reached, as results say it."""
    return None if at is None else {"commit": at.commit, "virtual_seconds": at.virtual_seconds}


def reaching(result: dict[str, Any], metrics: Sequence[Mapping[str, Any]], target: str | None) -> dict[str, Any]:
    """A result with a target, as results call it, that the run's config may not have named."""
    if target is None or target in result["reached"]:
        return result
    name, value = target_of(target)
    more = result.get("metrics", {}).get(name, {}).get("more_is_better", name != "loss")
    return result | {"reached": result["reached"] | {target: moment(crossing(metrics, value, 1, name, bool(more)))}}


def summed_up(metrics: Sequence[Mapping[str, Any]], name: str, figure: Figure) -> dict[str, Any]:
    """A metric of a whole run: at its end and at its best, and which data it comes from."""
    seen = [(row[name], row["commit"]) for row in metrics if row.get(name) is not None]
    more = figure.more_is_better
    best = None if not seen or more is None else (max if more else min)(value for value, _ in seen)
    return {
        "final": seen[-1][0] if seen else None,
        "best": best,
        "best_commit": next((commit for value, commit in seen if value == best), None),
        "more_is_better": more,
        "data": figure.data,
    }


def client_rows(account: Account, figures: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """Return one row per client: its number in the task as given, its updates, and what the last evaluation found of
    it. Where clients were left out, `run_client` is its number in the run: in the trace and in messages."""
    ids = account.client_ids
    names = [{"client": c} if ids is None else {"client": ids[c], "run_client": c} for c in range(account.clients)]
    return [
        {**name, "updates": account.participation[c], **{figure: values[c] for figure, values in figures.items()}}
        for c, name in enumerate(names)
    ]
