"""The theorems, by method. Pure arithmetic: the table needs neither arrays nor PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.meters import dlsgd, fedagrac, fedavg, fedbuff, hlsgd
from offbeat.meters.constants import Advice, Constants, Plan

Theorem = Callable[[Constants, Plan], Advice]
EVERYONE: tuple[Theorem, ...] = (fedavg.theorem43, fedavg.corollary44)
SAMPLED: tuple[Theorem, ...] = (fedavg.theorem45, fedavg.corollary46)
THEOREMS: dict[str, tuple[Theorem, ...]] = {
    "dlsgd-hetero": (dlsgd.theorem2,),
    "dlsgd-homo": (dlsgd.theorem1,),
    "fedagrac": (fedagrac.theorem2,),
    "fedbuff": (fedbuff.theorem1,),
    "hl-sgd": (hlsgd.theorem1, hlsgd.theorem2, hlsgd.corollary1),  # all report; a part of them; and how few may
    "local-sgd": (*EVERYONE, *SAMPLED),
}
