"""Tables as text, of a given width. Columns go by rank where they do not fit; where even the first two do not, each
row becomes a list. Sentences are broken between words; a number, or a word, is never cut."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len

GAP = 2  # blanks between columns
SENTENCE = 30  # characters of a cell with blanks from which on it may be broken
LEAST = 20  # the narrowest column of broken sentences


def laid_out(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, ranks: Sequence[int] | None = None,
    drop: bool = True,
) -> list[str]:  # fmt: skip
    """The lines of a table. `ranks` has a number for each column: the largest goes first, equal ones from the right;
    the first column stays. With `drop` false all columns stay, however wide they are.

    >>> print("\\n".join(laid_out(["method", "loss", "idle"], [["fedbuff", "0.1234", "0.50"]], 16)))
    method     loss
    ───────  ──────
    fedbuff  0.1234
    without: idle
    """
    ranks = list(range(len(columns))) if ranks is None else list(ranks)
    kept = list(range(len(columns)))
    if width is None:
        return drawn(columns, rows, kept, {})
    order = sorted(kept[1:], key=lambda place: (ranks[place], place))
    while len(kept) > 2 and drop and least_width(columns, rows, kept) > width:
        kept.remove(order.pop())
    if drop and least_width(columns, rows, kept) > width:
        return listed(columns, rows, width)
    lines = drawn(columns, rows, kept, sentence_widths(columns, rows, kept, width))
    gone = [name for place, name in enumerate(columns) if place not in kept]
    said = textwrap.wrap(f"without: {', '.join(gone)}", width, break_long_words=False, break_on_hyphens=False)
    return lines + (said if gone else [])


def widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, (name, *(row[place] for row in rows)))) for place, name in enumerate(columns)]


def sentences(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[int, int]:
    """Columns whose cells may be broken, with the longest word in each."""
    places = {}
    for place, name in enumerate(columns):
        cells = [row[place] for row in rows]
        if any(" " in cell and cell_len(cell) > SENTENCE for cell in cells):
            places[place] = max(cell_len(word) for cell in (name, *cells) for word in cell.split() or [""])
    return places


def least_width(columns: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    full, broken = widths(columns, rows), sentences(columns, rows)
    each = [min(full[place], max(LEAST, broken[place])) if place in broken else full[place] for place in kept]
    return sum(each) + GAP * (len(each) - 1)


def sentence_widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], width: int
) -> dict[int, int]:
    """How wide each column of sentences is: they share what the others leave."""
    full, broken = widths(columns, rows), sentences(columns, rows)
    mine = [place for place in kept if place in broken]
    room = width - GAP * (len(kept) - 1) - sum(full[place] for place in kept if place not in broken)
    shares = {}
    for number, place in enumerate(sorted(mine, key=full.__getitem__)):
        share = max(LEAST, broken[place], min(full[place], room // (len(mine) - number)))
        shares[place] = min(share, full[place])
        room -= shares[place]
    return shares


def drawn(
    columns: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], narrow: dict[int, int]
) -> list[str]:
    full = widths(columns, rows)
    wide = {place: narrow.get(place, full[place]) for place in kept}
    right = {place for place in kept[1:] if place not in narrow and all(numeric(row[place]) for row in rows)}

    def line(cells: Sequence[str]) -> str:
        parts = [padded(cell, wide[place], place in right) for place, cell in zip(kept, cells, strict=True)]
        return (" " * GAP).join(parts).rstrip()

    lines = [line([columns[place] for place in kept]), line(["─" * wide[place] for place in kept])]
    for row in rows:
        cells = [wrapped(row[place], wide[place]) if place in narrow else [row[place]] for place in kept]
        for number in range(max(map(len, cells))):
            lines.append(line([cell[number] if number < len(cell) else "" for cell in cells]))
    return lines


def listed(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Each row by itself: a line for every column, names before values; where that is too wide, values below names."""
    head = max((cell_len(name) for name in columns), default=0)
    lines: list[str] = []
    for row in rows:
        for name, cell in zip(columns, row, strict=True):
            longest = max((cell_len(word) for word in cell.split()), default=0)
            beside = head + GAP + longest <= width
            parts = wrapped(cell, max(longest, width - head - GAP if beside else width))
            if beside:
                lines += [
                    f"{padded(name if not n else '', head)}{' ' * GAP}{part}".rstrip() for n, part in enumerate(parts)
                ]
            else:
                lines += [name, *parts]
        lines.append("")
    return lines[:-1]


def wrapped(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]


def padded(cell: str, width: int, right: bool = False) -> str:
    blanks = " " * (width - cell_len(cell))
    return blanks + cell if right else cell + blanks


def numeric(cell: str) -> bool:
    """Whether a cell is a figure, perhaps with a unit, or none."""
    return not cell or cell[0].isdigit() or cell[0] in "-+±<>" or cell in ("inf", "nan", "not reached", "some seeds")
