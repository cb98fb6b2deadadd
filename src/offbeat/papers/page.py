"""What has been run, what agrees with the papers, and the pages that say so: made from the records alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from offbeat.papers import agreement
from offbeat.papers.ledger import Ledger, estimate, kind_of
from offbeat.papers.recipe import Cell, Claim, Recipe, Record, Records, Settings
from offbeat.papers.runner import missing, pick_name
from offbeat.runs import report

PAPER_NAMES = {
    "dlsgd": "DLSGD: Delayed Local-SGD",
    "fedagrac": "FedaGrac: calibrated local steps",
    "fedbuff": "FedBuff: unbounded gradients",
    "heterogeneity": "FedAvg on heterogeneity",
    "hlsgd": "HL-SGD: hybrid local SGD",
    "questions": "Questions",
}
ELSEWHERE = (  # tables and figures that are no runs
    ("dlsgd", "DLSGD Table 1", "the rates; every recipe has them, and a test holds them against the paper"),
    ("dlsgd", "DLSGD Figure 1", "a drawing of the receive and send buffers: docs/design.md"),
    (
        "fedagrac",
        "FedaGrac Tables 3, 4, 5",
        "networks; tests hold their shapes and numbers of parameters against the paper",
    ),
    ("fedbuff", "FedBuff Table 1", "rates of convergence, as functions: `offbeat.theory.fedbuff.TABLE_1`"),
    ("heterogeneity", "FedAvg on heterogeneity, Figure 1", "a drawing of local and centralised steps"),
    ("hlsgd", "HL-SGD Table 1", "iteration complexities, as functions: `offbeat.theory.hlsgd.TABLE_1`"),
)


def records_of(recipe: Recipe, kept: Ledger) -> tuple[dict[str, Sequence[Record]], set[str]]:
    """The records of each cell by its name in this recipe, and which cells have only older ones."""
    records: dict[str, Sequence[Record]] = {}
    older = set()
    for cell in recipe.cells:
        mine: Sequence[Record] = kept.of(cell)
        if not mine and (mine := kept.older_of(cell)):
            older.add(cell.name)
        if mine:
            records[cell.name] = mine
    return records, older


def claimed(claim: Claim, records: Records) -> tuple[float, bool, bool | None] | None:
    """Our ratio, whether the order is the paper's, and whether the ratio agrees; None where a value is lacking."""
    pair = [agreement.ours(records.get(name, ()), claim.value) for name in (claim.cell, claim.other)]
    one, other = pair
    if one is None or other is None or math.isnan(one.mean) or math.isnan(other.mean):
        return None
    if math.isinf(one.mean) and math.isinf(other.mean):
        return None
    ratio = one.mean / other.mean if other.mean else math.inf
    close = (
        None
        if claim.ratio is None or math.isinf(ratio)
        else 1 / agreement.CLOSE <= ratio / claim.ratio <= agreement.CLOSE
    )
    return ratio, (ratio > 1) == claim.larger, close


def cells(recipes: Sequence[Recipe], kept: Ledger, settings: Settings) -> list[dict[str, Any]]:
    """Missing cells in the order in which they would be run, and their seconds on this kind of device."""
    kind, rows = kind_of(pick_name(settings.device)), []
    for cell, run in missing(recipes, kept, settings):
        seconds, how = estimate(cell, kind, kept)
        rows.append({"recipe": cell.home, "cell": cell.record, "seed": run.seed, "priority": cell.priority,
                      "seconds": round(seconds, 1), "how": how, "device": kind})  # fmt: skip
    return rows


def status(recipes: Sequence[Recipe], kept: Ledger) -> list[dict[str, Any]]:
    """A line for each cell: its seeds and commits, ours and the paper's, whether the ratio is within 25 %, and how many
    of its comparable pairs have the paper's order."""
    rows = []
    for recipe in recipes:
        records, older = records_of(recipe, kept)
        compared = list(agreement.pairs(recipe, records))
        for cell in recipe.cells:
            mine = records.get(cell.name, ())
            own = [right for low, high, _, right in compared if cell.name in (low.name, high.name)]
            values = {name: agreement.ours(mine, name) for name in recipe.values}
            agrees = {name: agreement.ratio_agrees(values[name], cell.paper.get(name)) for name in recipe.values}
            rows.append({
                "recipe": recipe.name, "cell": cell.name, "state": state(cell, mine, cell.name in older, recipe.seeds),
                "seeds": [record["seed"] for record in mine], "commits": sorted({str(r.get("commit")) for r in mine}),
                "ours": {name: value and value.mean for name, value in values.items()}, "paper": dict(cell.paper),
                "within 25 %": {name: value for name, value in agrees.items() if value is not None},
                "pairs": len(own), "pairs in order": sum(own),
                "failed": next((record["failed"] for record in mine if record.get("failed")), None),
            })  # fmt: skip
    return rows


def state(cell: Cell, records: Sequence[Record], older: bool, seeds: int) -> str:
    if not records:
        return "missing"
    if older:
        return "older"
    return "run" if len(records) >= seeds else "some seeds"


def show(cells: Sequence[dict[str, Any]], console: Console) -> None:
    """One table; of tables inside a line, the figures."""
    columns = [name for name in (cells[0] if cells else {}) if name != "failed"]
    rows = [[spoken(line[name]) for name in columns] for line in cells]
    title = f"{len(cells)} cells"
    if cells and "seconds" in cells[0]:
        title += f", about {sum(line['seconds'] for line in cells):,.0f} s"
    report.show(title, columns, rows, console)


def spoken(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {spoken(v)}" for name, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(spoken, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return agreement.shown(value) if isinstance(value, float) else str(value)


# ---- pages ----------------------------------------------------------------------------------------
def counts(recipe: Recipe, records: Records) -> tuple[int, int, int, int]:
    """Comparable pairs and claims in the paper's order, of how many; figures within 25 %, of how many."""
    order = [right for *_, right in agreement.pairs(recipe, records)]
    close: list[bool] = []
    for cell in recipe.cells:
        for name in recipe.values if cell.home == recipe.name else ():
            agrees = agreement.ratio_agrees(agreement.ours(records.get(cell.name, ()), name), cell.paper.get(name))
            close += [] if agrees is None else [agrees]
    for claim in recipe.claims:
        if (said := claimed(claim, records)) is not None:
            far = claim.ratio is None or max(claim.ratio, 1 / claim.ratio) > agreement.APART
            order += [said[1]] if far else []
            close += [] if said[2] is None else [said[2]]
    return sum(order), len(order), sum(close), len(close)


def section(recipe: Recipe, kept: Ledger, folder: Path) -> tuple[str, tuple[int, int, int, int]]:
    """A recipe's part of the page: table, picture, claims, remarks, and what is missing at which cost."""
    records, older = records_of(recipe, kept)
    numbers = counts(recipe, records)
    lines = [f"### {recipe.title}", "", f"`offbeat paper {recipe.origin}`. {ran(recipe, records, older)}"]
    if numbers[1] or numbers[3]:
        lines[-1] += f" Order: {numbers[0]} of {numbers[1]}; within 25 %: {numbers[2]} of {numbers[3]}."
    if records and (recipe.small_table or recipe.picture is None):
        made = agreement.table(recipe, agreement.by_cell(recipe, records), "")
        lines += ["", report.markdown(made.columns, made.rows).rstrip()]
    for claim in recipe.claims:
        said = claimed(claim, records)
        ratio = "" if said is None else f"{said[0]:.3g} times" if 0 < said[0] < math.inf else "one is not reached"
        text = "not known yet" if said is None else f"ours {ratio}, {'the same' if said[1] else 'another'} order"
        lines.append(f"* {claim.text}: {text}" if claim is not recipe.claims[0] else f"\n* {claim.text}: {text}")
    if records and recipe.picture is not None:
        for path in recipe.picture(
            recipe, agreement.by_cell(recipe, records), folder / "pictures" / f"{recipe.name}.png"
        ):
            lines += ["", f"![{recipe.title}](pictures/{path.name})"]
    lines += [f"\n{note}" for note in recipe.notes]
    if lacking := sum(max(0, recipe.seeds - len(kept.of(cell))) for cell in recipe.cells if cell.home == recipe.name):
        lines.append(f"\nMissing: {lacking} runs, about {cost(recipe, kept):,.0f} s on an H200.")
    if failed := [
        f"{name}: {r['failed'].splitlines()[0][:120]}"
        for name, runs in records.items()
        for r in runs[:1]
        if r.get("failed")
    ]:
        lines.append("\nFailed: " + "; ".join(failed) + ".")
    return "\n".join(lines) + "\n", numbers


def ran(recipe: Recipe, records: Records, older: set[str]) -> str:
    """Which cells have been run, and what the missing ones cost."""
    new = [record for name, runs in records.items() if name not in older for record in runs]
    said = f"{len(records) - len(older)} of {len(recipe.cells)} cells run"
    if new:
        seeds, commits = max(record["seed"] for record in new) + 1, sorted({record["commit"] for record in new})
        said += (
            f" ({seeds} of {recipe.seeds} seeds; {', '.join(commits)}; {', '.join(sorted({r['device'] for r in new}))})"
        )
    if older:
        commits = sorted({str(record["commit"]) for name in older for record in records[name]})
        said += f"; {len(older)} older, with other draws ({', '.join(commits)})"
    return said + "."


def cost(recipe: Recipe, kept: Ledger) -> float:
    """Seconds on an H200 for all missing cells and seeds of a recipe that are its own."""
    own = [cell for cell in recipe.cells if cell.home == recipe.name]
    return sum(estimate(cell, "h200", kept)[0] * max(0, recipe.seeds - len(kept.of(cell))) for cell in own)


HEAD = """Made by `offbeat paper {1} --page` from the records in [{0}papers/]({0}papers); do not edit by hand. Ours
is the mean over seeds ± the deviation, the paper's figure stands in brackets; = marks a ratio within 25 %, ! one
beyond. A pair of cells that differ in one word is comparable where the paper's figures differ by more than 10 %; it
agrees where ours have the same order. Claims in a paper's words count as pairs."""


def write_pages(recipes: Sequence[Recipe], kept: Ledger) -> list[Path]:
    """README.md beside the folder of records, with every table and picture; and docs/papers.md, a line for each."""
    results, asked = kept.folder.parent, recipes[0].origin if len(recipes) == 1 else "all"
    docs = results.parent / "docs" / "papers.md"
    parts, lines, totals, paper = [], [], [0, 0, 0, 0], ""
    for recipe in recipes:
        text, numbers = section(recipe, kept, results)
        if not recipe.name.startswith("questions"):  # they vary what is stated
            totals = [a + b for a, b in zip(totals, numbers, strict=True)]
        if (name := recipe.name.partition("-")[0]) != paper:
            paper = name
            parts.append(f"## {PAPER_NAMES.get(name, name)}\n")
        parts.append(text)
        records, older = records_of(recipe, kept)
        lines.append([f"[{recipe.title}](../{results.name}/README.md#{anchor(recipe.title)})", ran(recipe, records,
        older),
                      f"{numbers[0]} / {numbers[1]}", f"{numbers[2]} / {numbers[3]}",
                      f"{cost(recipe, kept):,.0f}"])  # fmt: skip
    share = f"{totals[0]} of {totals[1]} comparable pairs and claims have the paper's order"
    share += f" ({totals[0] / totals[1]:.0%})" if totals[1] else ""
    share += f"; {totals[2]} of {totals[3]} figures are within 25 %."
    papers = {recipe.name.partition("-")[0] for recipe in recipes}
    also = "\n".join(f"* {name}: {text}." for paper, name, text in ELSEWHERE if paper in papers)
    older_pages = ", ".join(f"[{path.stem}]({path.name})" for path in sorted(results.glob("*.md"))
                            if path.stem in ("dlsgd-table2", "fedagrac", "heterogeneity", "hlsgd"))  # fmt: skip
    if older_pages:
        older_pages = f"\n\nEarlier results, with the reasons that were found then: {older_pages}."
    head = HEAD.format("", asked)
    readme = f"# The papers' tables and figures, ours beside theirs\n\n{head}\n\n**{share}**{older_pages}\n\n"
    (results / "README.md").write_text(readme + "\n".join(parts) + (f"\n## Without runs\n\n{also}\n" if also else ""))
    columns = ("table or figure", "run", "order", "within 25 %", "missing, s on an H200")
    docs.parent.mkdir(parents=True, exist_ok=True)
    head = f"# Papers\n\n{HEAD.format(f'../{results.name}/', asked)}\n\n**{share}**\n\n"
    docs.write_text(f"{head}{report.markdown(columns, lines)}\n{also}\n")
    return [results / "README.md", docs]


def anchor(title: str) -> str:
    """The fragment that a heading has on a page.

    >>> anchor("HL-SGD Figure 1: tau = 50, p = 1")
    'hl-sgd-figure-1-tau--50-p--1'
    """
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
