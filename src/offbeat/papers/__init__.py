"""One recipe per table or figure of the papers: `offbeat paper NAME`."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.papers import dlsgd, fedbuff
from offbeat.papers.recipe import Made, Settings

PAPERS: dict[str, Callable[[Settings], Made]] = {
    "dlsgd-fig2": dlsgd.fig2,
    "dlsgd-fig3": dlsgd.fig3,
    "dlsgd-fig6": dlsgd.fig6,
    "dlsgd-table2": dlsgd.table2,
    "fedbuff-fig1": fedbuff.fig1,
}
