"""The theorems. Pure arithmetic: the table needs neither arrays nor PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

from offbeat.errors import ConfigError
from offbeat.theory import dlsgd, fedagrac, fedavg, fedbuff, hlsgd
from offbeat.theory.constants import Advice, Constants, Plan

Bound = Callable[[Constants, Plan], Advice]


def any_plan(constants: Constants, plan: Plan) -> bool:
    return True


def everyone(constants: Constants, plan: Plan) -> bool:
    return plan.cohort == constants.clients


def sampled(constants: Constants, plan: Plan) -> bool:
    return plan.cohort != constants.clients


def all_report(constants: Constants, plan: Plan) -> bool:
    return plan.reports == 1


def some_report(constants: Constants, plan: Plan) -> bool:
    return plan.reports < 1


def unequal_steps(constants: Constants, plan: Plan) -> Advice:
    """FedaGrac's Theorem 1, of FedAvg, with the clients' losses where they were measured as those at the optimum."""
    return fedagrac.theorem1(constants, plan, at_optimum=constants.client_losses)


def of_quadratics(bound: Bound) -> Bound:
    @wraps(bound)
    def asked(constants: Constants, plan: Plan) -> Advice:
        if not constants.quadratic:
            raise ConfigError(["it is about quadratics, and gradients here are not affine"])
        return bound(constants, plan)

    return asked


@dataclass(frozen=True)
class Theorem:
    """A theorem: the methods that it speaks of, the function that asks it, and which of their plans it is about."""

    methods: tuple[str, ...]
    bound: Bound
    about: Callable[[Constants, Plan], bool] = any_plan


THEOREMS = {  # by the names that papers give them
    "DLSGD, Theorem 1": Theorem(("dlsgd-homo",), dlsgd.theorem1),
    "DLSGD, Theorem 2": Theorem(("dlsgd-hetero",), dlsgd.theorem2),
    "FedBuff, Theorem 1": Theorem(("fedbuff",), fedbuff.theorem1),
    "FedAvg, Theorem 4.3": Theorem(("local-sgd",), fedavg.theorem43, everyone),
    "FedAvg, Corollary 4.4": Theorem(("local-sgd",), fedavg.corollary44, everyone),
    "FedAvg, Theorem 4.5": Theorem(("local-sgd",), fedavg.theorem45, sampled),
    "FedAvg, Corollary 4.6": Theorem(("local-sgd",), fedavg.corollary46, sampled),
    "FedAvg, Theorem 5.5": Theorem(("local-sgd",), of_quadratics(fedavg.theorem55), everyone),
    "FedAvg, Theorem A.1": Theorem(("local-sgd",), of_quadratics(fedavg.theorem_a1), everyone),
    "FedAvg, Corollary A.3": Theorem(("local-sgd",), of_quadratics(fedavg.corollary_a3), everyone),
    "FedaGrac, Theorem 1": Theorem(("local-sgd",), unequal_steps, everyone),
    "FedaGrac, Theorem 2": Theorem(("fedagrac",), fedagrac.theorem2),
    "FedaGrac, Theorem 3": Theorem(("fedagrac",), fedagrac.theorem3),
    "HL-SGD, Theorem 1": Theorem(("hl-sgd",), hlsgd.theorem1, all_report),
    "HL-SGD, Theorem 2": Theorem(("hl-sgd",), hlsgd.theorem2, some_report),
    "HL-SGD, Corollary 1": Theorem(("hl-sgd",), hlsgd.corollary1, some_report),
    "HL-SGD, Table 1": Theorem(("hl-sgd", "gossip-pga", "gossip-sgd"), hlsgd.table1),
}
ADVISED = sorted({method for theorem in THEOREMS.values() for method in theorem.methods})
BOUNDS = {name: theorem.bound for name, theorem in THEOREMS.items()}
