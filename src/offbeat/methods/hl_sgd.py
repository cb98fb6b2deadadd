"""HL-SGD: gossip inside clusters over fast device-to-device links, server averaging between them.

Guo, Sun, Hu, Gong: Hybrid local SGD for federated learning with heterogeneous communications. ICLR 2022 (Algorithm 1).
The same file is, by its options, gossip PGA (one cluster; Chen et al., ICML 2021), hierarchical local SGD (edge servers
take the mean; Liu et al., ICC 2020), and without gossip (gossip_rounds = 0) and with p = 1 Local SGD, or distributed
SGD when local_steps = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.method import Cohort, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import local, optimisers
from offbeat.numerics.rates import Rate
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds


@takes_policy()
def hl_sgd(
    when: Policy = Hybrid(Rounds(10)),  # 2-5, 8, 12-15
    client_lr: Rate = 0.05,
    server_lr: Rate = 1.0,
    weights: Weights = "uniform",
    client_options: Mapping[str, Any] | None = None,
    server_optimiser: str | Mapping[str, Any] = "sgd",
) -> Method:
    """Devices step and mix, X <- W (X - lr G), then some of each cluster report: w <- w - server_lr * mean(delta).

    They take local_steps (tau) and mix with their neighbours gossip_rounds times after every gossip_every (l); then
    m = p n of each cluster report.

    The mean over clusters is by devices ("uniform": n_k / N, which is line 16 where clusters are of one size) or by
    samples ("size"). The fleet has the clusters, their graphs and W.
    """
    share, optimiser = shares(weights), optimisers.server_optimiser(server_lr, server_optimiser)

    def apply(w: State, mean: Update, cohort: Cohort) -> State:
        return optimiser.apply(w, mean["delta"], cohort.version)  # 16

    steps = local.sgd(client_lr, client_options)  # 6, 7
    rule = Rule(steps, init=optimiser.init, weigh=share.of, apply=apply, clients=share.clients)
    return Method("hl-sgd", when, rule)
