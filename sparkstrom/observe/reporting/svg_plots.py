"""SVG plots: curves over time, and bars, as elements of a page; colours come from its style.

No script: a figure under the pointer is told by titles, which browsers show, and every plot has
its figures as a table, too, for those who do not see it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from xml.etree.ElementTree import Element

from sparkstrom.observe.reporting.markup import element, table
from sparkstrom.observe.reporting.quantities import figure
from sparkstrom.observe.reporting.scales import Scale, label
from sparkstrom.observe.reporting.summary_groups import Table
from sparkstrom.observe.reporting.thinning import Point, pieces, spaced, thinned

WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 408.0, 14.0, 196.0  # of the area in which curves are
POINTS_MAX = 240  # of a curve
PIECES_MAX = 60  # that gaps cut it into
DOTS_MAX = 60  # beyond it they hide the line
LOOKS_MAX = 40  # places at which the pointer is told the figures
ROWS_MAX = 16  # of a plot's table
MARKS_MAX = 40
STYLES = 6  # colours and dashes there are


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over seconds. ``style`` is its colour and dash; ``has_steps``: it holds its value."""

    name: str
    style: int
    pieces: list[list[Point]]
    known: list[Point]
    has_steps: bool = False
    has_dots: bool = False  # single points, such as epochs' ends, joined by a line

    @classmethod
    def of(
        cls,
        name: str,
        style: int,
        seconds: Sequence[float],
        values: Sequence[float | None],
        **how: bool,
    ) -> Curve:
        """Values at these moments; where one is not known the curve has a gap."""
        found = pieces(seconds, values)
        return cls(name, style, found, [point for piece in found for point in piece], **how)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened; ``kind`` is "lost", "back", "bad" or "saved"."""

    seconds: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """All plots of a fit have the same: seconds are divided by ``unit_s`` to be read."""

    first_s: float
    last_s: float
    unit_s: float
    unit: str

    @classmethod
    def of(cls, first_s: float, last_s: float) -> TimeAxis:
        """In seconds, minutes or hours."""
        end_s = max(last_s, first_s + 1e-3)
        if end_s > 3 * 3600:
            return cls(first_s, end_s, 3600.0, "hours")
        unit_s, unit = (60.0, "minutes") if end_s > 300 else (1.0, "seconds")
        return cls(first_s, end_s, unit_s, unit)

    def x(self, seconds: float) -> float:
        """Where that moment is."""
        part = (seconds - self.first_s) / (self.last_s - self.first_s)
        return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, part))

    def words(self, seconds: float) -> str:
        """The moment, for people."""
        return f"{seconds / self.unit_s:.4g} {self.unit}"


@dataclass(frozen=True, slots=True)
class TimePlot:
    """Curves over time. ``say`` writes a value with its unit."""

    title: str
    unit: str  # of the vertical axis
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    is_log: bool = False
    from_zero: bool = False
    say: Callable[[float | None], str] = figure


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, of parts that follow one another: (name, seconds)."""

    name: str
    parts: list[tuple[str, float]]
    more: str = ""  # about it, under the pointer

    @property
    def whole(self) -> float:
        return sum(value for _, value in self.parts)

    def of(self, name: str) -> float:
        """That part's."""
        return sum(value for part, value in self.parts if part == name)


@dataclass(frozen=True, slots=True)
class BarPlot:
    """Bars that lie; a part's colour is that of its name's place in ``names``."""

    title: str
    unit: str
    bars: list[Bar]
    names: list[str]
    say: Callable[[float | None], str]


# -- curves --------------------------------------------------------------------------------------


def time_plot(plot: TimePlot, axis: TimeAxis) -> Element:
    """A figure with heading, legend, drawing and table."""
    values = [y for curve in plot.curves for _, y in curve.known]
    scale = Scale.of(values, is_log=plot.is_log, from_zero=plot.from_zero)
    looks = _looks(plot)
    drawing = _drawing(
        plot.title,
        f"{plot.title}, in {plot.unit}, over {axis.words(axis.last_s)}. {_in_words(plot)}",
        HEIGHT,
        _grid(scale, axis, plot.unit),
        element("g", *(_mark(mark, axis) for mark in plot.marks[:MARKS_MAX])),
        element("g", *(part for curve in plot.curves for part in _curve(curve, scale, axis))),
        element("g", *_look_strips(plot, looks, axis)),
    )
    legend = element("ul", *(_curve_key(curve) for curve in plot.curves), class_="legend")
    return _figure(plot.title, legend, drawing, _values(plot, looks, axis))


def _in_words(plot: TimePlot) -> str:
    said = [
        f"{curve.name}: from {plot.say(known[0][1])} to {plot.say(known[-1][1])}"
        for curve in plot.curves
        if (known := curve.known)
    ]
    return "; ".join(said)


def _grid(scale: Scale, axis: TimeAxis, unit: str) -> Element:
    lines = []
    for value in scale.ticks(5):
        y = _y(scale, value)
        lines.append(element("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(element("text", label(value), x=LEFT - 6, y=y + 4, text_anchor="end"))
    across = Scale(axis.first_s / axis.unit_s, axis.last_s / axis.unit_s)
    for value in across.ticks(5):
        x = axis.x(value * axis.unit_s)
        lines.append(element("line", x1=x, x2=x, y1=BOTTOM, y2=BOTTOM + 4, class_="axis"))
        lines.append(element("text", label(value), x=x, y=BOTTOM + 18, text_anchor="middle"))
    lines.append(element("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"))
    middle = (LEFT + RIGHT) / 2
    below = f"{axis.unit} since the fit began"
    lines.append(element("text", below, x=middle, y=BOTTOM + 36, text_anchor="middle"))
    upright = f"translate(11 {(TOP + BOTTOM) / 2:.0f}) rotate(-90)"
    lines.append(element("text", unit, transform=upright, text_anchor="middle"))
    return element("g", *lines, class_="scale")


def _y(scale: Scale, value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * scale.place(value)


def _curve(curve: Curve, scale: Scale, axis: TimeAxis) -> list[Element]:
    found = []
    shown = [curve.pieces[i] for i in spaced(len(curve.pieces), PIECES_MAX)]
    for piece in shown:
        few = thinned(piece, max(2, POINTS_MAX // len(shown)))
        points = [(axis.x(x), _y(scale, y)) for x, y in few if scale.holds(y)]
        if curve.has_steps:
            points = _stairs(points)
        place = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if len(points) > 1:
            found.append(element("polyline", points=place, class_=f"curve c{curve.style}"))
        has_dots = curve.has_dots and len(points) <= DOTS_MAX
        dots = points if has_dots or len(points) == 1 else []
        found += [element("circle", cx=x, cy=y, r=3, class_=f"dot c{curve.style}") for x, y in dots]
    return found


def _stairs(points: list[Point]) -> list[Point]:
    """A value holds until the next one."""
    held = [(after[0], before[1]) for before, after in pairwise(points)]
    return [point for pair in zip_longest(points, held) for point in pair if point is not None]


def _mark(mark: Mark, axis: TimeAxis) -> Element:
    x = axis.x(mark.seconds)
    tip = f"{x - 4:.1f},{TOP - 8:.1f} {x + 4:.1f},{TOP - 8:.1f} {x:.1f},{TOP:.1f}"
    if mark.kind == "back":
        tip = f"{x - 4:.1f},{TOP:.1f} {x + 4:.1f},{TOP:.1f} {x:.1f},{TOP - 8:.1f}"
    return element(
        "g",
        element("title", f"{axis.words(mark.seconds)}: {mark.words}"),
        element("line", x1=x, x2=x, y1=TOP, y2=BOTTOM),
        element("polygon", points=tip),
        element("rect", x=x - 5, y=TOP - 10, width=10, height=BOTTOM - TOP + 10, class_="hit"),
        class_=f"mark {mark.kind}",
    )


def _looks(plot: TimePlot) -> list[float]:
    """Moments at which something is known, evenly among them."""
    moments = sorted({x for curve in plot.curves for x, _ in curve.known})
    return [moments[i] for i in spaced(len(moments), LOOKS_MAX)]


def _at(curve: Curve, seconds: float) -> float | None:
    """The newest value by then."""
    place = bisect_right(curve.known, seconds, key=lambda point: point[0])
    return curve.known[place - 1][1] if place else None


def _look_strips(plot: TimePlot, looks: list[float], axis: TimeAxis) -> list[Element]:
    """Strips side by side; the one under the pointer tells its figures."""
    centres = [axis.x(moment) for moment in looks]
    middles = [(a + b) / 2 for a, b in pairwise(centres)]
    strips = []
    for moment, x, begin, end in zip(
        looks, centres, [LEFT, *middles], [*middles, RIGHT], strict=True
    ):
        said = [f"{curve.name}: {plot.say(_at(curve, moment))}" for curve in plot.curves]
        strips.append(
            element(
                "g",
                element("title", "\n".join([axis.words(moment), *said])),
                element("line", x1=x, x2=x, y1=TOP, y2=BOTTOM),
                element("rect", x=begin, y=TOP, width=max(0.5, end - begin), height=BOTTOM - TOP),
                class_="look",
            )
        )
    return strips


def _values(plot: TimePlot, looks: list[float], axis: TimeAxis) -> Table:
    rows = []
    for i in spaced(len(looks), ROWS_MAX):
        said = (_at(curve, looks[i]) for curve in plot.curves)
        rows.append(
            (f"{looks[i] / axis.unit_s:.4g}", *("" if y is None else plot.say(y) for y in said))
        )
    return Table((axis.unit, *(curve.name for curve in plot.curves)), rows)


# -- bars ----------------------------------------------------------------------------------------

BAR, SPACE, FROM = 16.0, 26.0, 124.0  # its height, from one to the next, where bars begin
BELOW = 42.0  # room for the scale
NAME_MAX = 16  # letters of a bar's name


def bar_plot(plot: BarPlot) -> Element:
    """A figure with heading, legend, drawing and table."""
    scale = Scale(0.0, max([*(bar.whole for bar in plot.bars), 1e-9]) * 1.02)
    height = TOP + SPACE * len(plot.bars) + BELOW
    drawn = (part for i, bar in enumerate(plot.bars) for part in _bar(i, bar, scale, plot))
    said = "; ".join(f"{bar.name} {plot.say(bar.whole)}" for bar in plot.bars)
    grid = _bar_grid(scale, height - BELOW, plot.unit)
    drawing = _drawing(plot.title, f"{plot.title}. {said}", height, grid, element("g", *drawn))
    keys = [_bar_key(name, i % STYLES) for i, name in enumerate(plot.names)]
    legend = element("ul", *keys, class_="legend") if len(keys) > 1 else None
    rows = [(bar.name, *(plot.say(bar.of(name)) for name in plot.names)) for bar in plot.bars]
    return _figure(plot.title, legend, drawing, Table(("", *plot.names), rows))


def _bar_grid(scale: Scale, bottom: float, unit: str) -> Element:
    lines = []
    for value in scale.ticks(5):
        x = FROM + (RIGHT - FROM) * scale.place(value)
        lines.append(element("line", x1=x, x2=x, y1=TOP, y2=bottom, class_="grid"))
        lines.append(element("text", label(value), x=x, y=bottom + 16, text_anchor="middle"))
    middle = (FROM + RIGHT) / 2
    lines.append(element("text", unit, x=middle, y=bottom + 34, text_anchor="middle"))
    return element("g", *lines, class_="scale")


def _bar(index: int, bar: Bar, scale: Scale, plot: BarPlot) -> list[Element]:
    y, short = TOP + SPACE * index + (SPACE - BAR) / 2, bar.name
    if len(short) > NAME_MAX:
        short = short[: NAME_MAX - 1] + "…"
    name = element("text", short, x=FROM - 8, y=y + BAR - 4, text_anchor="end")
    whose = ", ".join(filter(None, (bar.name, bar.more)))
    name.append(element("title", whose))
    drawn, before = [name], 0.0
    for part, value in bar.parts:
        begin, end = (FROM + (RIGHT - FROM) * scale.place(at) for at in (before, before + value))
        before += value
        style = plot.names.index(part) % STYLES if part in plot.names else 0
        title = element("title", f"{whose}, {part}: {plot.say(value)}")
        width = max(0.5, end - begin)
        drawn.append(
            element("rect", title, x=begin, y=y, width=width, height=BAR, class_=f"bar c{style}")
        )
    return drawn


# -- around them ---------------------------------------------------------------------------------


def _drawing(title: str, said: str, height: float, *parts: Element) -> Element:
    box = f"0 0 {WIDTH:.0f} {height:.0f}"
    return element("svg", *parts, viewBox=box, role="img", aria_label=said or title, class_="plot")


def _curve_key(curve: Curve) -> Element:
    line = element("line", x1=1, x2=25, y1=6, y2=6, class_=f"curve c{curve.style}")
    dot = element("circle", cx=13, cy=6, r=3, class_=f"dot c{curve.style}")
    drawn = (line, dot) if curve.has_dots else (line,)
    return _key(curve.name, "key", "0 0 26 12", *drawn)


def _bar_key(name: str, style: int) -> Element:
    box = element("rect", x=1, y=1, width=10, height=10, class_=f"bar c{style}")
    return _key(name, "key box", "0 0 14 12", box)


def _key(name: str, kind: str, box: str, *drawn: Element) -> Element:
    shown = element("svg", *drawn, viewBox=box, class_=kind, aria_hidden="true")
    return element("li", shown, name)


def _figure(title: str, legend: Element | None, drawing: Element, values: Table) -> Element:
    head = element("figcaption", element("h4", title), legend)
    shown = element("details", element("summary", "Values"), table(values))
    return element("figure", head, drawing, shown)
