"""Scalability page: what so many workers come to, for people."""

from __future__ import annotations

from sparkstrom.spark.driver.scalability import Scaling, WorkerPace

TITLES = {"star": "star (plain)", "mesh": "mesh", "ring": "dense all-reduce (ring)"}
HEADER = (
    "workers  per step  efficiency  speedup  staleness  link bytes of a worker, driver  waits for"
)


def text_of_scaling(scaling: Scaling) -> str:
    """A table of each way to share, for doublings of workers and the best number."""
    work = scaling.work
    lines = [
        f"{work.n_params:,} parameters, {_time(work.step_s)} a step; an update has "
        f"{work.entries:,} entries, {_size(work.update_bytes)} on the wire, and takes "
        f"{_time(work.publication_s)} to encode; links of {_rate(work.link_bits_s)}, "
        f"{_time(work.latency_s)} one way.",
    ]
    for way, title in TITLES.items():
        lines += ["", *_table(scaling, way, title)]
    lines += [
        "",
        "Efficiency and speedup are against one machine alone, in minibatches per second.",
    ]
    return "\n".join(lines)


def _table(scaling: Scaling, way: str, title: str) -> list[str]:
    best, pays = scaling.best(way), scaling.pays_up_to(way)
    shown = [pace for pace in scaling.paces[way] if _is_shown(pace.workers, scaling, best, pays)]
    lines = [title, HEADER]
    for pace in shown:
        lines.append(
            f"{pace.workers:7,}  {_time(pace.step_s):>8}  {pace.efficiency:9.0%}  "
            f"{pace.speedup:7.1f}  {_stale(pace):>9}  "
            f"{_links(pace):>30}  {pace.limited_by}"
        )
    lines.append(_verdict(best, pays, scaling.workers[-1]))
    return lines


def _verdict(best: int, pays: int, last: int) -> str:
    if best == 1:
        return "one machine alone is faster: none of these numbers of workers pays"
    upto = "to the last of them" if pays == last else f"up to {pays:,}"
    brings = f"each more brings at least half of one, on average, {upto}"
    if pays == 1:
        brings = "each more than one machine brings less than half of one, on average"
    return f"most minibatches per second: {best:,} workers; {brings}"


def _is_shown(workers: int, scaling: Scaling, best: int, pays: int) -> bool:
    ends = scaling.workers[0], scaling.workers[-1], best, pays
    return workers in ends or workers & (workers - 1) == 0 or len(scaling.workers) <= 8


def _stale(pace: WorkerPace) -> str:
    return f"{pace.staleness:.1f}" if pace.staleness else "none"


def _links(pace: WorkerPace) -> str:
    """Per step, sent and received."""
    worker, driver = (
        pace.worker_sent + pace.worker_received,
        pace.driver_sent + pace.driver_received,
    )
    return f"{_size(worker)}, {_size(driver)}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def _size(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _rate(bits: float) -> str:
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
