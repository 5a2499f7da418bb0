"""Pages for people: one HTML file with tables and charts, without a network, light and dark, wide and narrow.

Charts are drawn by uPlot (core/web/, MIT), which is written into every page: 51 KB, hover values, labels that fit. A
browser without scripts gets the tables and the last value of every series.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from .artifact import command_line
from .console import cell
from .hardware import machine

POINTS = 1000  # of a series: more are averaged, a screen has no more columns

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over a common x: (name, points) each. Series without points are left out. `logarithmic`: both axes, which
    takes positive numbers. `errors`: of a line by its name the half width of a band around it, at some of its x.
    """

    title: str
    series: Sequence[tuple[str, Points]]
    x: str = "step"
    logarithmic: bool = False
    errors: Mapping[str, Points] = field(default_factory=dict)

    @property
    def drawn(self) -> list[tuple[str, list[tuple[float, float]]]]:
        """What is drawn, with at most POINTS points a series."""
        return [(name, thin(points)) for name, points in self.series if points]

    @property
    def data(self) -> str:
        """The chart as JSON for plots.js: xs once, and for each series a y or null at every x; behind them the upper
        and the lower bounds of the series in `bands`. No "<" in it: no name can end the script element around it.
        """
        names, lines = [name for name, _ in self.drawn], [dict(points) for _, points in self.drawn]
        xs = sorted({x for line in lines for x in line})
        bands = [place for place, name in enumerate(names) if self.errors.get(name)]
        for place in bands:
            half = dict(thin(self.errors[names[place]]))
            for sign in (1, -1):
                lines.append({x: y + sign * half[x] for x, y in lines[place].items() if x in half})
        columns = [[line.get(x) for x in xs] for line in lines]
        found = {"x": self.x, "names": names, "data": [xs, *columns], "log": self.logarithmic, "bands": bands}
        return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


@dataclass(frozen=True)
class Bar:
    """A share of 1, perhaps with its 95 % interval and what chance gives; `text` stands for the percent."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    random: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Part:
    """A section of a page; what is empty is left out. Without a `header` it is a table of labels and values."""

    heading: str = ""
    note: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    charts: Sequence[Chart] = ()
    bars: Sequence[Bar] = ()
    text: str = ""
    items: Sequence[tuple[str, str]] = ()
    svg: str = ""  # a drawing, as it stands: names in it are escaped by who made it

    @property
    def filled(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.rows or self.shown or self.bars or self.text or self.items or self.svg)

    @property
    def figures(self) -> list[bool]:
        """Which columns are set to the right: those of numbers, as such or written out."""
        return [all(re.fullmatch(r"-|[-+]?[\d.,]+%?", cell(one)) for one in each) for each in zip(*self.rows)]

    @property
    def shown(self) -> list[Chart]:
        """The charts that have points."""
        return [chart for chart in self.charts if chart.drawn]


def page(title: str, parts: Sequence[Part], note: str = "") -> str:
    """The page as HTML."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    parts = [part for part in parts if part.filled]
    plots = any(part.shown for part in parts)
    return environment.from_string(_file("page.html")).render(
        title=title,
        note=note,
        parts=parts,
        styles=Markup((_file("uplot.css") if plots else "") + _file("page.css")),  # noqa: S704 - our own files
        scripts=Markup(_file("uplot.js") + "\n" + _file("plots.js")) if plots else "",  # noqa: S704
        raw=Markup,
        shown=cell,
    )


def made_here() -> str:
    """When, where and by which command: the note of a page of measurements."""
    cpu = machine().cpu
    return f"{time.strftime('%Y-%m-%d')}, {cpu.name}, {cpu.cores} cores. {command_line()}"


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def thin(points: Points) -> list[tuple[float, float]]:
    """At most POINTS points: means of equal stretches."""
    if len(points) <= POINTS:
        return list(points)
    size = len(points) / POINTS
    parts = [points[int(i * size) : int((i + 1) * size)] for i in range(POINTS)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
