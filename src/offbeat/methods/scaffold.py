"""SCAFFOLD: control variates correct each local step by what the others' gradients look like.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: stochastic controlled averaging for federated learning.
ICML 2020 (Algorithm 1). With weights other than "uniform" means are weighted, and c is the weighted mean of all c_i.

A client sends its new c_i, and the server keeps what each client sent last and moves c by the change. So c is the mean
over all clients of the c_i received last, also where updates are lost or a client is drawn several times for a round.
"""

from __future__ import annotations

from typing import Literal

from offbeat.method import Cohort, Job, Local, Method, Policy, Rule, State, Update, takes_policy
from offbeat.numerics import optimisers
from offbeat.numerics.local import Corrected, corrected_step
from offbeat.numerics.rates import Rate, client_rate, rate
from offbeat.numerics.weights import Weights, shares
from offbeat.schedule.rounds import Rounds


@takes_policy()
def scaffold(
    when: Policy = Rounds(),  # 3-4
    client_lr: Rate = 0.05,
    server_lr: Rate = 1.0,
    option: Literal["I", "II"] = "II",
    weights: Weights = "uniform",
    start: Literal["zeros", "gradients"] = "zeros",
) -> Method:
    """n sampled clients (None: all) step along g + c - c_i; `option` says how c_i is renewed.

    I: the gradient over the whole shard at the server's model (one more pass over the data); II: the mean of the local
    gradients. `start`: control variates begin at zero, or at the clients' gradients at version 0.
    """
    share, at = shares(weights), rate(server_lr)

    def begin(given: State, job: Job) -> Corrected:
        return Corrected(given["model"], given["c"] - given["c_i"])  # 7

    def finish(given: State, path: Corrected, job: Job) -> Update:
        delta = given["model"] - path.y
        if option == "I":
            renewed = given["gradient"]  # 12 (i)
        else:
            renewed = delta / (job.steps * job.lr) - path.c  # 12 (ii): c_i - c + (x - y) / (K lr)
        return {"delta": delta, "control": renewed, "c_i": renewed}  # 13-14

    def commit(w: State, updates: Update, cohort: Cohort) -> State:
        model = w["model"] - at(cohort.version) * (share.of(cohort) @ updates["delta"])  # 16-17
        change = updates["control"] - updates["kept control"]
        return {"model": model, "c": w["c"] + share.once(cohort) @ change, "kept control": updates["control"]}

    steps = Local(
        begin, corrected_step, finish, {"lr": client_rate(client_lr)}, ("delta", "control"), remembers=("c_i",),
        full_gradient=option == "I",
    )  # fmt: skip
    prime = (lambda w, mean: w | {"c": mean}) if start == "gradients" else None
    rule = Rule(
        steps, init=optimisers.beside("c"), commit=commit, keeps=("kept control",), broadcasts=("model", "c"),
        share=share.of, prime=prime, clients=share.clients,
    )  # fmt: skip
    return Method("scaffold", when, rule)
