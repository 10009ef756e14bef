"""Draw plots as SVG: curves over time and bar charts, with axes, legends and tables of values.

The page's style sheet provides the colours. There are no scripts: browsers show values under the
pointer from ``title`` elements, and every plot also includes its values as a table, for readers who
cannot see the drawing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from xml.etree.ElementTree import Element

from sparkstrom.observe.reporting.summary_rendering import (
    Table,
    format_number,
    make_element,
    table_element,
)

TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
# Leading digits of logarithmic ticks; the first set that gives few enough ticks is used.
LOG_TICK_DIGITS = ((1, 2, 5), (1, 3), (1,))
VALUE_MAX = 1e300  # larger values are not drawn: the sum of two would be infinite
RELATIVE_RANGE_MIN = 1e-9  # minimum size of an axis range relative to its values


@dataclass(frozen=True, slots=True)
class AxisScale:
    """The range of an axis from ``low`` to ``high``; logarithmic if ``is_log``."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def fit(
        cls, values: Iterable[float], *, is_log: bool = False, from_zero: bool = False
    ) -> AxisScale:
        """Return a scale for these values with a margin; a logarithmic one ignores values <= 0.

        ``from_zero``: include 0; this has no effect on a logarithmic scale.
        """
        least = 1 / VALUE_MAX if is_log else -VALUE_MAX
        known = [value for value in values if least < value < VALUE_MAX]
        if not known:
            return cls(0.1, 1.0, True) if is_log else cls(0.0, 1.0)
        low, high = min(known), max(known)
        if is_log:
            return cls(low / 1.25, high * 1.25, True)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if high - low <= RELATIVE_RANGE_MIN * max(abs(low), abs(high), RELATIVE_RANGE_MIN):
            room = abs(high) / 2 or 1.0
            return cls(low if from_zero else low - room, high + room)
        room = (high - low) * 0.05
        return cls(low if from_zero and low == 0.0 else low - room, high + room)

    def position(self, value: float) -> float:
        """Return a value's position, from 0 at the low end to 1 at the high end."""
        if self.is_log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def contains(self, value: float | None) -> bool:
        """Return whether a value lies in the range."""
        return value is not None and self.low <= value <= self.high

    def ticks(self, count_max: int = 6) -> list[float]:
        """Return round numbers within the range, approximately ``count_max`` or fewer."""
        if self.is_log and self.high / self.low > 8:
            return self._log_ticks(count_max)
        step_min = (self.high - self.low) / count_max
        power = 10.0 ** math.floor(math.log10(step_min))
        step = next(step for step in (s * power for s in TICK_STEPS) if step >= step_min * 0.999)
        first = math.ceil(self.low / step - RELATIVE_RANGE_MIN)
        last = math.floor(self.high / step + RELATIVE_RANGE_MIN)
        return [i * step for i in range(first, last + 1)]

    def _log_ticks(self, count_max: int) -> list[float]:
        """Return ticks of a logarithmic scale, with as many digits per power of ten as fit."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for digits in LOG_TICK_DIGITS:
            ticks = [d * 10.0**power for power in range(first, last + 1) for d in digits]
            ticks = [value for value in ticks if self.contains(value)]
            if len(ticks) <= count_max:
                return ticks
        every = -(-len(ticks) // count_max)
        return ticks[::every]


def format_tick(value: float) -> str:
    """Format a tick's value briefly: 0, 0.25, 1500, 20k, 3M, 1e-5."""
    size = abs(value)
    if size >= 1e4:
        for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= unit:
                return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}".replace("e-0", "e-")


Point = tuple[float, float]


def split_at_gaps(xs: Sequence[float], ys: Sequence[float | None]) -> list[list[Point]]:
    """Return the points (x, y) as a list of stretches, separated where y is unknown (None)."""
    pieces: list[list[Point]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def downsample(points: Sequence[Point], count_max: int) -> list[Point]:
    """Reduce a curve to ``count_max`` points: its ends, and each section's minimum and maximum."""
    if len(points) <= count_max:
        return list(points)
    stretches, chosen = max(1, (count_max - 2) // 2), {0, len(points) - 1}
    for i in range(stretches):
        begin, end = i * len(points) // stretches, (i + 1) * len(points) // stretches
        inside = range(begin, end)
        chosen.add(min(inside, key=lambda i: points[i][1]))
        chosen.add(max(inside, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(chosen)]


def evenly_spaced_indices(count: int, count_max: int) -> list[int]:
    """Return at most ``count_max`` evenly spaced indices below ``count``, with both ends."""
    if count <= count_max:
        return list(range(count))
    return sorted({round(i * (count - 1) / (count_max - 1)) for i in range(count_max)})


WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 408.0, 14.0, 196.0  # edges of the area for curves, in pixels
POINTS_MAX = 240  # points per curve
PIECES_MAX = 60  # pieces per curve, separated by gaps
DOTS_MAX = 60  # dots per curve; more would hide the line
HOVER_POINTS_MAX = 40  # moments whose values are shown under the pointer
ROWS_MAX = 16  # rows in a plot's table
MARKS_MAX = 40  # event marks per plot
STYLE_COUNT = 6  # colours and dashes that the page's style defines


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a plot over time, in seconds."""

    name: str  # shown in the legend
    style: int  # number of the curve's colour and dash in the style sheet
    pieces: list[list[Point]]  # stretches without gaps
    known: list[Point]  # all points
    has_steps: bool = False  # draw a staircase: a value holds until the next one
    has_dots: bool = False  # draw a dot at each point, such as the ends of epochs

    @classmethod
    def from_values(
        cls,
        name: str,
        style: int,
        seconds: Sequence[float],
        values: Sequence[float | None],
        **flags: bool,
    ) -> Curve:
        """Make a curve from values at these times; an unknown value (None) leaves a gap.

        ``flags``: has_steps and has_dots.
        """
        stretches = split_at_gaps(seconds, values)
        return cls(
            name, style, stretches, [point for piece in stretches for point in piece], **flags
        )


@dataclass(frozen=True, slots=True)
class EventMark:
    """An event marked in a plot."""

    seconds: float  # since the fit began
    kind: str  # worker "lost" or "back" (replaced), "bad" loss, or checkpoint "saved"
    description: str  # shown under the pointer


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The time axis that all plots of a fit share."""

    first_s: float  # left end
    last_s: float  # right end
    unit_s: float  # seconds per unit of the tick labels
    unit: str  # unit of the tick labels

    @classmethod
    def spanning(cls, first_s: float, last_s: float) -> TimeAxis:
        """Return an axis in seconds, minutes or hours, depending on its length."""
        end_s = max(last_s, first_s + 1e-3)
        if end_s > 3 * 3600:
            return cls(first_s, end_s, 3600.0, "hours")
        unit_s, unit = (60.0, "minutes") if end_s > 300 else (1.0, "seconds")
        return cls(first_s, end_s, unit_s, unit)

    def x(self, seconds: float) -> float:
        """Return the horizontal pixel of a time, limited to the plot's area."""
        part = (seconds - self.first_s) / (self.last_s - self.first_s)
        return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, part))

    def format_moment(self, seconds: float) -> str:
        """Return a time as text in the axis's unit, such as "12.5 minutes"."""
        return f"{seconds / self.unit_s:.4g} {self.unit}"


@dataclass(frozen=True, slots=True)
class TimePlot:
    """The contents of one plot over time: curves, marks, scale and titles."""

    title: str  # heading
    unit: str  # label of the vertical axis
    curves: Sequence[Curve]
    marks: Sequence[EventMark] = ()
    is_log: bool = False  # whether the vertical axis is logarithmic
    from_zero: bool = False  # whether the vertical axis begins at 0
    format_value: Callable[[float | None], str] = format_number  # for the values as text


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, made up of stacked parts."""

    name: str  # to the left of the bar
    parts: list[tuple[str, float]]  # (name, seconds)
    more: str = ""  # additional text shown under the pointer

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(value for _, value in self.parts)

    def part_seconds(self, name: str) -> float:
        """Return the seconds of the part ``name``, or 0 if the bar lacks it."""
        return sum(value for part, value in self.parts if part == name)


@dataclass(frozen=True, slots=True)
class BarPlot:
    """The contents of a plot of horizontal bars; the order of ``names`` determines the colours."""

    title: str  # heading
    unit: str  # label of the horizontal axis
    bars: list[Bar]  # from top to bottom
    names: list[str]  # names of the bars' parts
    format_value: Callable[[float | None], str]  # for the values as text


def render_time_plot(plot: TimePlot, axis: TimeAxis) -> Element:
    """Return a figure element with heading, legend, drawing and table of values."""
    values = [y for curve in plot.curves for _, y in curve.known]
    scale = AxisScale.fit(values, is_log=plot.is_log, from_zero=plot.from_zero)
    moments = _hover_seconds(plot)
    drawing = _svg_element(
        plot.title,
        f"{plot.title}, in {plot.unit}, over {axis.format_moment(axis.last_s)}."
        f" {_describe_curves(plot)}",
        HEIGHT,
        _grid_element(scale, axis, plot.unit),
        make_element("g", *(_mark_element(mark, axis) for mark in plot.marks[:MARKS_MAX])),
        make_element(
            "g", *(part for curve in plot.curves for part in _curve_elements(curve, scale, axis))
        ),
        make_element("g", *_hover_strips(plot, moments, axis)),
    )
    legend = make_element(
        "ul", *(_curve_legend_item(curve) for curve in plot.curves), class_="legend"
    )
    return _figure_element(plot.title, legend, drawing, _value_table(plot, moments, axis))


def _describe_curves(plot: TimePlot) -> str:
    """Return a description of each curve by its first and last value, for screen readers."""
    parts = [
        f"{curve.name}: from {plot.format_value(known[0][1])} to {plot.format_value(known[-1][1])}"
        for curve in plot.curves
        if (known := curve.known)
    ]
    return "; ".join(parts)


def _grid_element(scale: AxisScale, axis: TimeAxis, unit: str) -> Element:
    """Return grid lines, tick labels and axis titles."""
    lines = []
    for value in scale.ticks(5):
        y = _y_position(scale, value)
        lines.append(make_element("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(
            make_element("text", format_tick(value), x=LEFT - 6, y=y + 4, text_anchor="end")
        )
    across = AxisScale(axis.first_s / axis.unit_s, axis.last_s / axis.unit_s)
    for value in across.ticks(5):
        x = axis.x(value * axis.unit_s)
        lines.append(make_element("line", x1=x, x2=x, y1=BOTTOM, y2=BOTTOM + 4, class_="axis"))
        lines.append(
            make_element("text", format_tick(value), x=x, y=BOTTOM + 18, text_anchor="middle")
        )
    lines.append(make_element("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"))
    middle = (LEFT + RIGHT) / 2
    below = f"{axis.unit} since the fit began"
    lines.append(make_element("text", below, x=middle, y=BOTTOM + 36, text_anchor="middle"))
    upright = f"translate(11 {(TOP + BOTTOM) / 2:.0f}) rotate(-90)"
    lines.append(make_element("text", unit, transform=upright, text_anchor="middle"))
    return make_element("g", *lines, class_="scale")


def _y_position(scale: AxisScale, value: float) -> float:
    """Return the vertical pixel of a value."""
    return BOTTOM - (BOTTOM - TOP) * scale.position(value)


def _curve_elements(curve: Curve, scale: AxisScale, axis: TimeAxis) -> list[Element]:
    """Return a curve's lines and dots as SVG elements, with fewer points if there are many."""
    elements = []
    shown = [curve.pieces[i] for i in evenly_spaced_indices(len(curve.pieces), PIECES_MAX)]
    for piece in shown:
        kept = downsample(piece, max(2, POINTS_MAX // len(shown)))
        points = [(axis.x(x), _y_position(scale, y)) for x, y in kept if scale.contains(y)]
        if curve.has_steps:
            points = _step_points(points)
        place = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if len(points) > 1:
            elements.append(make_element("polyline", points=place, class_=f"curve c{curve.style}"))
        has_dots = curve.has_dots and len(points) <= DOTS_MAX
        dots = points if has_dots or len(points) == 1 else []
        elements += [
            make_element("circle", cx=x, cy=y, r=3, class_=f"dot c{curve.style}") for x, y in dots
        ]
    return elements


def _step_points(points: list[Point]) -> list[Point]:
    """Return the points of a staircase, in which each value holds until the next one."""
    corners = [(after[0], before[1]) for before, after in pairwise(points)]
    return [point for pair in zip_longest(points, corners) for point in pair if point is not None]


def _mark_element(mark: EventMark, axis: TimeAxis) -> Element:
    """Return the vertical line and triangle that mark an event."""
    x = axis.x(mark.seconds)
    tip = f"{x - 4:.1f},{TOP - 8:.1f} {x + 4:.1f},{TOP - 8:.1f} {x:.1f},{TOP:.1f}"
    if mark.kind == "back":
        tip = f"{x - 4:.1f},{TOP:.1f} {x + 4:.1f},{TOP:.1f} {x:.1f},{TOP - 8:.1f}"
    return make_element(
        "g",
        make_element("title", f"{axis.format_moment(mark.seconds)}: {mark.description}"),
        make_element("line", x1=x, x2=x, y1=TOP, y2=BOTTOM),
        make_element("polygon", points=tip),
        make_element("rect", x=x - 5, y=TOP - 10, width=10, height=BOTTOM - TOP + 10, class_="hit"),
        class_=f"mark {mark.kind}",
    )


def _hover_seconds(plot: TimePlot) -> list[float]:
    """Return at most HOVER_POINTS_MAX times at which at least one curve has a point."""
    moments = sorted({x for curve in plot.curves for x, _ in curve.known})
    return [moments[i] for i in evenly_spaced_indices(len(moments), HOVER_POINTS_MAX)]


def _value_at(curve: Curve, seconds: float) -> float | None:
    """Return a curve's latest value at a time, or None if there is none yet."""
    place = bisect_right(curve.known, seconds, key=lambda point: point[0])
    return curve.known[place - 1][1] if place else None


def _hover_strips(plot: TimePlot, moments: list[float], axis: TimeAxis) -> list[Element]:
    """Return adjacent transparent strips, each with the values to show under the pointer."""
    centres = [axis.x(moment) for moment in moments]
    middles = [(a + b) / 2 for a, b in pairwise(centres)]
    strips = []
    for moment, x, begin, end in zip(
        moments, centres, [LEFT, *middles], [*middles, RIGHT], strict=True
    ):
        values = [
            f"{curve.name}: {plot.format_value(_value_at(curve, moment))}" for curve in plot.curves
        ]
        strips.append(
            make_element(
                "g",
                make_element("title", "\n".join([axis.format_moment(moment), *values])),
                make_element("line", x1=x, x2=x, y1=TOP, y2=BOTTOM),
                make_element(
                    "rect", x=begin, y=TOP, width=max(0.5, end - begin), height=BOTTOM - TOP
                ),
                class_="look",
            )
        )
    return strips


def _value_table(plot: TimePlot, moments: list[float], axis: TimeAxis) -> Table:
    """Return a table of all curves' values at some of these times."""
    rows = []
    for i in evenly_spaced_indices(len(moments), ROWS_MAX):
        values = (_value_at(curve, moments[i]) for curve in plot.curves)
        texts = ("" if y is None else plot.format_value(y) for y in values)
        rows.append((f"{moments[i] / axis.unit_s:.4g}", *texts))
    return Table((axis.unit, *(curve.name for curve in plot.curves)), rows)


BAR_HEIGHT, BAR_PITCH, BARS_LEFT = 16.0, 26.0, 124.0  # pixels
SCALE_HEIGHT = 42.0  # pixels below the bars
BAR_NAME_CHARS_MAX = 16


def render_bar_plot(plot: BarPlot) -> Element:
    """Return a figure element with heading, legend, drawing and table of values."""
    scale = AxisScale(0.0, max([*(bar.total for bar in plot.bars), 1e-9]) * 1.02)
    height = TOP + BAR_PITCH * len(plot.bars) + SCALE_HEIGHT
    drawn = (part for i, bar in enumerate(plot.bars) for part in _bar_elements(i, bar, scale, plot))
    description = "; ".join(f"{bar.name} {plot.format_value(bar.total)}" for bar in plot.bars)
    grid = _bar_grid_element(scale, height - SCALE_HEIGHT, plot.unit)
    drawing = _svg_element(
        plot.title, f"{plot.title}. {description}", height, grid, make_element("g", *drawn)
    )
    keys = [_bar_legend_item(name, i % STYLE_COUNT) for i, name in enumerate(plot.names)]
    legend = make_element("ul", *keys, class_="legend") if len(keys) > 1 else None
    rows = [
        (bar.name, *(plot.format_value(bar.part_seconds(name)) for name in plot.names))
        for bar in plot.bars
    ]
    return _figure_element(plot.title, legend, drawing, Table(("", *plot.names), rows))


def _bar_grid_element(scale: AxisScale, bottom: float, unit: str) -> Element:
    """Return grid lines, tick labels and the axis title for horizontal bars."""
    lines = []
    for value in scale.ticks(5):
        x = BARS_LEFT + (RIGHT - BARS_LEFT) * scale.position(value)
        lines.append(make_element("line", x1=x, x2=x, y1=TOP, y2=bottom, class_="grid"))
        lines.append(
            make_element("text", format_tick(value), x=x, y=bottom + 16, text_anchor="middle")
        )
    middle = (BARS_LEFT + RIGHT) / 2
    lines.append(make_element("text", unit, x=middle, y=bottom + 34, text_anchor="middle"))
    return make_element("g", *lines, class_="scale")


def _bar_elements(index: int, bar: Bar, scale: AxisScale, plot: BarPlot) -> list[Element]:
    """Return a bar's name and its stacked rectangles."""
    y, label = TOP + BAR_PITCH * index + (BAR_PITCH - BAR_HEIGHT) / 2, bar.name
    if len(label) > BAR_NAME_CHARS_MAX:
        label = label[: BAR_NAME_CHARS_MAX - 1] + "…"
    name = make_element("text", label, x=BARS_LEFT - 8, y=y + BAR_HEIGHT - 4, text_anchor="end")
    full_name = ", ".join(filter(None, (bar.name, bar.more)))
    name.append(make_element("title", full_name))
    drawn, start = [name], 0.0
    for part, value in bar.parts:
        begin, end = (
            BARS_LEFT + (RIGHT - BARS_LEFT) * scale.position(at) for at in (start, start + value)
        )
        start += value
        style = plot.names.index(part) % STYLE_COUNT if part in plot.names else 0
        title = make_element("title", f"{full_name}, {part}: {plot.format_value(value)}")
        width = max(0.5, end - begin)
        drawn.append(
            make_element(
                "rect", title, x=begin, y=y, width=width, height=BAR_HEIGHT, class_=f"bar c{style}"
            )
        )
    return drawn


def _svg_element(title: str, description: str, height: float, *parts: Element) -> Element:
    """Return the drawing as an SVG element; the description is for screen readers."""
    box = f"0 0 {WIDTH:.0f} {height:.0f}"
    return make_element(
        "svg", *parts, viewBox=box, role="img", aria_label=description or title, class_="plot"
    )


def _curve_legend_item(curve: Curve) -> Element:
    """Return a curve's entry in the legend."""
    line = make_element("line", x1=1, x2=25, y1=6, y2=6, class_=f"curve c{curve.style}")
    dot = make_element("circle", cx=13, cy=6, r=3, class_=f"dot c{curve.style}")
    drawn = (line, dot) if curve.has_dots else (line,)
    return _legend_item(curve.name, "key", "0 0 26 12", *drawn)


def _bar_legend_item(name: str, style: int) -> Element:
    """Return the legend entry for a part of the bars."""
    box = make_element("rect", x=1, y=1, width=10, height=10, class_=f"bar c{style}")
    return _legend_item(name, "key box", "0 0 14 12", box)


def _legend_item(name: str, kind: str, box: str, *drawn: Element) -> Element:
    """Return a legend entry: a small drawing and a name."""
    shown = make_element("svg", *drawn, viewBox=box, class_=kind, aria_hidden="true")
    return make_element("li", shown, name)


def _figure_element(title: str, legend: Element | None, drawing: Element, values: Table) -> Element:
    """Return a figure with heading, legend, drawing and a collapsed table of values."""
    head = make_element("figcaption", make_element("h4", title), legend)
    shown = make_element("details", make_element("summary", "Values"), table_element(values))
    return make_element("figure", head, drawing, shown)
