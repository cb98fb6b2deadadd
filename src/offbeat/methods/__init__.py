"""One paper, one file. The table below is what `offbeat list methods` shows and what a config may name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

from offbeat.config.options import extends
from offbeat.errors import ConfigError
from offbeat.method import Method, policy_options
from offbeat.methods.async_hl_sgd import async_hl_sgd
from offbeat.methods.asysg import asysg
from offbeat.methods.dlsgd_hetero import dlsgd_hetero
from offbeat.methods.dlsgd_homo import dlsgd_homo
from offbeat.methods.fedagrac import fedagrac
from offbeat.methods.fedasync import fedasync
from offbeat.methods.fedbuff import fedbuff
from offbeat.methods.fedlin import fedlin
from offbeat.methods.fednova import fednova
from offbeat.methods.fedprox import fedprox
from offbeat.methods.gossip_sgd import gossip_sgd
from offbeat.methods.hl_sgd import hl_sgd
from offbeat.methods.local_sgd import local_sgd
from offbeat.methods.minibatch_sgd import minibatch_sgd
from offbeat.methods.scaffold import scaffold
from offbeat.numerics.local import optimised
from offbeat.stages import takes_stages


def variant(name: str, make: Callable[..., Method], preface: str = "", **fixed: Any) -> Callable[..., Method]:
    """A method under a name of its own, some of its options fixed; `preface` stands before what is said of it."""

    @wraps(make)
    def make_variant(**options: Any) -> Method:
        idle = policy_options(make) if options.get("when") is not None else ()
        return replace(make(**options, **{key: fixed[key] for key in fixed if key not in idle}), name=name)

    signature = inspect.signature(make)
    free = [p for p in signature.parameters.values() if p.name not in fixed]
    make_variant.__signature__ = signature.replace(parameters=free)  # type: ignore[attr-defined]
    make_variant.__doc__ = f"{preface}\n\n{make.__doc__}" if preface else make.__doc__
    return make_variant


def tries_optimisers(name: str, make: Callable[..., Method]) -> Callable[..., Method]:
    """A method whose formula speaks of steps of SGD, and one more option for those who experiment: `client_options`."""

    @extends(make)
    def make_optimised(*, client_options: Mapping[str, Any] | None = None, **options: Any) -> Method:
        method = make(**options)
        if client_options is None:
            return method
        if not options.get("experimental"):
            raise ConfigError(
                [
                    f"{name} is defined for plain steps of SGD: its formula reads gradients off them. Pass "
                    "experimental = true to put an optimiser's direction in the place of each gradient all the same"
                ]
            )
        local = optimised(method.what.local, client_options)
        if method.what.prime is not None and len(local.remembers) > len(method.what.local.remembers):
            raise ConfigError([f"{name}: with state = 'kept' take start = 'zeros'; an optimiser begins at zero"])
        return replace(method, what=replace(method.what, local=local))

    return make_optimised


PGA = "HL-SGD of which all devices report: on one cluster, gossip and now and then a mean of all."
EDGES = (
    "HL-SGD in which an edge server takes the mean of its cluster after every gossip_every steps and reports for it."
)
PLAIN: dict[str, Callable[..., Method]] = {
    "async-hl-sgd": async_hl_sgd,
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
    "gossip-pga": variant("gossip-pga", hl_sgd, PGA, p=1.0, edge=False),
    "gossip-sgd": gossip_sgd,
    "hierarchical-local-sgd": variant("hierarchical-local-sgd", hl_sgd, EDGES, p=1.0, gossip_rounds=1, edge=True),
    "hl-sgd": hl_sgd,
    "local-sgd": local_sgd,
    "minibatch-sgd": minibatch_sgd,
    "scaffold": scaffold,
}
STEPS_OF_SGD = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse", "fedlin", "fednova", "scaffold")
PLAIN |= {name: tries_optimisers(name, PLAIN[name]) for name in STEPS_OF_SGD}
METHODS = {name: takes_stages(make) for name, make in PLAIN.items()}
