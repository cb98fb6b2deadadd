"""One recipe per table or figure of the papers: `offbeat paper NAME`."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.papers import dlsgd, fedagrac, fedbuff, heterogeneity, hlsgd, inconsistency
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
    "fedbuff-theorem1": fedbuff.theorem1,
    "heterogeneity-fig2": heterogeneity.fig2,
    "heterogeneity-figC": heterogeneity.figC,
    "heterogeneity-table1": heterogeneity.table1,
    "heterogeneity-table2": heterogeneity.table2,
    "heterogeneity-table3": heterogeneity.table3,
    "heterogeneity-tableC1": heterogeneity.tableC1,
    "heterogeneity-tableC2": heterogeneity.tableC2,
    "hlsgd-fig1": hlsgd.fig1,
    "hlsgd-fig2": hlsgd.fig2,
    "hlsgd-fig3": hlsgd.fig3,
    "hlsgd-fig4": hlsgd.fig4,
    "hlsgd-fig5": hlsgd.fig5,
    "hlsgd-rates": hlsgd.rates,
    "hlsgd-slow-cluster": hlsgd.slow_cluster,
    "hlsgd-table2": hlsgd.table2,
}
