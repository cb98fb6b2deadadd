"""The theorems, by method. Pure arithmetic: the table needs neither arrays nor PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.errors import ConfigError
from offbeat.meters import dlsgd, fedagrac, fedavg, fedbuff, hlsgd
from offbeat.meters.constants import Advice, Constants, Plan

Theorem = Callable[[Constants, Plan], Advice]


def unequal_steps(constants: Constants, plan: Plan) -> Advice:
    """FedaGrac's Theorem 1, of FedAvg, with the clients' losses where they were measured as those at the optimum."""
    return fedagrac.theorem1(constants, plan, at_optimum=constants.client_losses)


def one_hessian(constants: Constants, plan: Plan) -> Advice:
    quadratics(constants)
    return fedavg.theorem55(constants, plan)


def several_hessians(constants: Constants, plan: Plan) -> Advice:
    quadratics(constants)
    return fedavg.theorem_a1(constants, plan)


def quadratics(constants: Constants) -> None:
    if not constants.quadratic:
        raise ConfigError(["it is about quadratics, and gradients here are not affine"])


EVERYONE: tuple[Theorem, ...] = (fedavg.theorem43, fedavg.corollary44, one_hessian, several_hessians, unequal_steps)
SAMPLED: tuple[Theorem, ...] = (fedavg.theorem45, fedavg.corollary46)
ALL_REPORT: tuple[Theorem, ...] = (hlsgd.theorem1, hlsgd.table1)
SOME_REPORT: tuple[Theorem, ...] = (hlsgd.theorem2, hlsgd.corollary1, hlsgd.table1)
THEOREMS: dict[str, tuple[Theorem, ...]] = {
    "dlsgd-hetero": (dlsgd.theorem2,),
    "dlsgd-homo": (dlsgd.theorem1,),
    "fedagrac": (fedagrac.theorem2, fedagrac.theorem3),
    "fedbuff": (fedbuff.theorem1,),
    "gossip-pga": (hlsgd.table1,),
    "gossip-sgd": (hlsgd.table1,),
    "hl-sgd": (*ALL_REPORT, *SOME_REPORT[:-1]),
    "local-sgd": (*EVERYONE, *SAMPLED),
}
TITLES: dict[Theorem, str] = {  # of those that may not be asked
    fedagrac.theorem3: "FedaGrac, Theorem 3",
    one_hessian: "FedAvg, Theorem 5.5",
    several_hessians: "FedAvg, Theorem A.1",
    unequal_steps: "FedaGrac, Theorem 1",
    hlsgd.table1: "HL-SGD, Table 1",
}
