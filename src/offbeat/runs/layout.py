"""Tables for papers and programs: Markdown, LaTeX, CSV, HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Sequence

from offbeat.runs.tables import numeric

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
}  # fmt: skip

Cells = Sequence[Sequence[str]]


def markdown(columns: Sequence[str], rows: Cells) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)]) + "\n"


def latex(columns: Sequence[str], rows: Cells) -> str:
    """A tabular with rules of the package booktabs.

    >>> print(latex(["method", "loss"], [["local_sgd", "0.5"]]), end="")
    \\begin{tabular}{lr}
    \\toprule
    method & loss \\\\
    \\midrule
    local\\_sgd & 0.5 \\\\
    \\bottomrule
    \\end{tabular}
    """

    def line(cells: Sequence[str]) -> str:
        return " & ".join(re.sub(r"[\\&%$#_{}~^±]", lambda m: SPECIAL[m[0]], cell) for cell in cells) + r" \\"

    right = ["r" if all(numeric(row[place]) for row in rows) else "l" for place in range(len(columns))]
    head = [rf"\begin{{tabular}}{{l{''.join(right[1:])}}}", r"\toprule", line(columns), r"\midrule"]
    return "\n".join([*head, *map(line, rows), r"\bottomrule", r"\end{tabular}"]) + "\n"


def comma_separated(columns: Sequence[str], rows: Cells) -> str:
    """Numbers without thousands' commas, as programs read them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([re.sub(r"(?<=\d),(?=\d{3})", "", cell) for cell in row] for row in rows)
    return text.getvalue()


def page_table(columns: Sequence[str], rows: Cells, title: str = "") -> str:
    """An HTML table, every text escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<table>{caption}<thead>{line(columns, 'th')}</thead><tbody>{body}</tbody></table>"


FORMS: dict[str, Callable[[Sequence[str], Cells], str]] = {
    "markdown": markdown,
    "latex": latex,
    "csv": comma_separated,
}
