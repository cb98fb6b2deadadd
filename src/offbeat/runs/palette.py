"""How figures are shown: a colour and a dash for each line, and units that a reader can say aloud.

Colours are Okabe and Ito's, which people of all kinds of colour vision tell apart; dashes tell lines apart in grey.
Standard library only: the page of `offbeat report` and the pictures use the same.
"""

from __future__ import annotations

from typing import NamedTuple

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#3d3d3d", "#7b3294")
DASHES = ((), (6, 2), (2, 1.5), (8, 2, 2, 2), (4, 1.5), (10, 3), (1, 1), (6, 2, 2, 2, 2, 2))  # in points; (): solid
DARK = ("#56b4e9", "#ff9d5c", "#3fd0a4", "#e8a9cb", "#e6c34a", "#a9d8f5", "#d0d0d0", "#c69be0")  # on a dark ground
GREY = "#767676"


class Style(NamedTuple):
    colour: str
    dash: tuple[float, ...]


def style(number: int) -> Style:
    """Of the line of this number: eight colours, and eight times as many lines before a pair recurs."""
    lap, place = divmod(number, len(COLOURS))
    return Style(COLOURS[place], DASHES[(place + lap) % len(DASHES)])


class Unit(NamedTuple):
    name: str
    size: float  # how many of the stored unit it has


SECONDS = (Unit("s", 1.0), Unit("min", 60.0), Unit("h", 3600.0), Unit("days", 86400.0))
BYTES = (Unit("B", 1.0), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9), Unit("TB", 1e12))
COUNTS = (Unit("", 1.0), Unit("thousand", 1e3), Unit("million", 1e6), Unit("thousand million", 1e9))
LEAST = {"s": 0.0, "min": 300.0, "h": 2 * 3600.0, "days": 4 * 86400.0}  # an axis that ends later takes the unit

AXES = {  # what curves may be drawn against: key of a metrics row, and what it is called
    "virtual_seconds": ("virtual_seconds", "virtual time"),
    "commits": ("commit", "commits"),
    "samples": ("samples", "samples"),
    "bytes": ("bytes", "bytes up and down"),
    "bytes_up": ("bytes_up", "bytes up"),
    "bytes_down": ("bytes_down", "bytes down"),
    "bytes_d2d": ("bytes_d2d", "bytes between devices"),
    "client_steps": ("client_steps", "client-steps"),
}


def unit_of(name: str, largest: float) -> Unit:
    """The unit in which numbers of this axis, up to the largest, are short.

    >>> unit_of("virtual_seconds", 20_000.0)
    Unit(name='h', size=3600.0)
    >>> unit_of("bytes_up", 5e6).name, unit_of("commits", 40).name
    ('MB', '')
    """
    if name == "virtual_seconds":
        return [unit for unit in SECONDS if largest >= LEAST[unit.name]][-1]
    units = BYTES if name.startswith("bytes") else COUNTS
    fitting = [unit for unit in units if largest >= unit.size * (1 if units is BYTES else 10)]
    return fitting[-1] if fitting else units[0]


def axis_label(name: str, unit: Unit) -> str:
    """What stands along an axis.

    >>> axis_label("virtual_seconds", Unit("h", 3600.0)), axis_label("samples", Unit("million", 1e6))
    ('virtual time (h)', 'samples (million)')
    """
    label = AXES[name][1] if name in AXES else name.replace("_", " ")
    return f"{label} ({unit.name})" if unit.name else label


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(0.25), duration(90), duration(7300)
    ('0.25 s', '90 s', '2.03 h')
    """
    unit = unit_of("virtual_seconds", seconds)
    return f"{seconds / unit.size:.3g} {unit.name}"


def size(many: float) -> str:
    """
    >>> size(0), size(12_345_678)
    ('0 B', '12.3 MB')
    """
    unit = unit_of("bytes", many)
    return f"{many / unit.size:.3g} {unit.name}"
