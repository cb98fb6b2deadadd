"""One recipe per table or figure of the papers: `offbeat paper NAME`."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.papers import dlsgd, fedagrac, fedbuff, inconsistency
from offbeat.papers.recipe import Made, Settings

PAPERS: dict[str, Callable[[Settings], Made]] = {
    "dlsgd-fig2": dlsgd.fig2,
    "dlsgd-fig3": dlsgd.fig3,
    "dlsgd-fig6": dlsgd.fig6,
    "dlsgd-table2": dlsgd.table2,
    "fedagrac-a9a": inconsistency.gap,
    "fedagrac-fig1": fedagrac.fig1,
    "fedagrac-fig2": fedagrac.fig2,
    "fedagrac-fig3": fedagrac.fig3,
    "fedagrac-fig4": fedagrac.fig4,
    "fedagrac-fig5": fedagrac.fig5,
    "fedagrac-table1": fedagrac.table1,
    "fedagrac-table2": fedagrac.table2,
    "fedagrac-table6": fedagrac.table6,
    "fedbuff-fig1": fedbuff.fig1,
}
