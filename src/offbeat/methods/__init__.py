"""One paper, one file. The table below is what `offbeat list methods` shows and what a config may name."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.method import Method
from offbeat.methods.asysg import asysg
from offbeat.methods.dlsgd_hetero import dlsgd_hetero
from offbeat.methods.dlsgd_homo import dlsgd_homo
from offbeat.methods.fedasync import fedasync
from offbeat.methods.fedbuff import fedbuff
from offbeat.methods.local_sgd import local_sgd
from offbeat.methods.minibatch_sgd import minibatch_sgd

METHODS: dict[str, Callable[..., Method]] = {
    "asysg": asysg,
    "dlsgd-hetero": dlsgd_hetero,
    "dlsgd-homo": dlsgd_homo,
    "fedasync": fedasync,
    "fedbuff": fedbuff,
    "local-sgd": local_sgd,
    "minibatch-sgd": minibatch_sgd,
}
