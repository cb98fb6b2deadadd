"""One paper, one file. The table below is what `offbeat list methods` shows and what a config may name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from offbeat.method import Method
from offbeat.methods.asysg import asysg
from offbeat.methods.dlsgd_hetero import dlsgd_hetero
from offbeat.methods.dlsgd_homo import dlsgd_homo
from offbeat.methods.fedagrac import fedagrac
from offbeat.methods.fedasync import fedasync
from offbeat.methods.fedbuff import fedbuff
from offbeat.methods.fedlin import fedlin
from offbeat.methods.fednova import fednova
from offbeat.methods.fedprox import fedprox
from offbeat.methods.local_sgd import local_sgd
from offbeat.methods.minibatch_sgd import minibatch_sgd
from offbeat.methods.scaffold import scaffold


def variant(name: str, make: Callable[..., Method], **fixed: Any) -> Callable[..., Method]:
    """A method under a name of its own, some of its options fixed."""

    @wraps(make)
    def made(**options: Any) -> Method:
        return replace(make(**options, **fixed), name=name)

    signature = inspect.signature(make)
    free = [p for p in signature.parameters.values() if p.name not in fixed]
    made.__signature__ = signature.replace(parameters=free)  # type: ignore[attr-defined]
    return made


METHODS: dict[str, Callable[..., Method]] = {
    "asysg": asysg,
    "dlsgd-hetero": dlsgd_hetero,
    "dlsgd-homo": dlsgd_homo,
    "fedagrac": fedagrac,
    "fedagrac-avg": variant("fedagrac-avg", fedagrac, transit="mean"),
    "fedagrac-first": variant("fedagrac-first", fedagrac, transit="first"),
    "fedagrac-reverse": variant("fedagrac-reverse", fedagrac, transit="reverse"),
    "fedasync": fedasync,
    "fedbuff": fedbuff,
    "fedlin": fedlin,
    "fednova": fednova,
    "fedprox": fedprox,
    "local-sgd": local_sgd,
    "minibatch-sgd": minibatch_sgd,
    "scaffold": scaffold,
}
