"""Which experiments can run live."""

from __future__ import annotations

from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.experiments.assemble import Built
from offbeat.numerics.windows import Windows


def require_live(built: Built) -> None:
    """Refuses an experiment that cannot run live: which part, and why."""
    problems = []
    experiment = built.experiment
    if built.method.what.lossless:
        problems.append(
            f"{built.method.name}: saving needs every finished update exactly, and live clients may lose theirs; leave "
            "out saving"
        )
    if built.hybrid is not None and (built.hybrid.edge or not built.hybrid.server):
        what = "an edge server inside each cluster" if built.hybrid.edge else "no server at all"
        problems.append(f"{built.method.name} has {what}, which does not run live; hl-sgd does")
    if not isinstance(experiment.method, str | dict):
        problems.append(
            f"method '{built.method.name}' was given as an object, and clients are told names, options and numbers; "
            "name it: a table with a name, or module:function"
        )
    if built.task.changing.state:
        problems.append(
            "the model has running statistics, or other buffers that change in training, which live clients do not "
            "exchange; use GroupNorm or LayerNorm"
        )
    if not all(isinstance(side, Tensor | Windows) for side in built.task.training):
        problems.append("samples have several parts, and live clients hold one tensor of inputs and one of targets")
    if problems:
        raise OffbeatError("; ".join(f"this experiment cannot run live: {problem}" for problem in problems))
