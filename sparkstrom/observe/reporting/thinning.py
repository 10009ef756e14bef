"""Thinning: as many points of a curve as a plot can show, none of its peaks left out."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]


def pieces(xs: Sequence[float], ys: Sequence[float | None]) -> list[list[Point]]:
    """The curve without what is not known, cut in two wherever something is not."""
    found: list[list[Point]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` points, in order: the ends, and of each stretch the lowest and highest."""
    if len(points) <= most:
        return list(points)
    stretches, kept = max(1, (most - 2) // 2), {0, len(points) - 1}
    for i in range(stretches):
        begin, end = i * len(points) // stretches, (i + 1) * len(points) // stretches
        inside = range(begin, end)
        kept.add(min(inside, key=lambda at: points[at][1]))
        kept.add(max(inside, key=lambda at: points[at][1]))
    return [points[at] for at in sorted(kept)]


def spaced(count: int, most: int) -> list[int]:
    """Indices below ``count``, at most ``most`` of them, evenly, the first and last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
