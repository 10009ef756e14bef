"""Scalability: time per step, efficiency and staleness of k workers, from a few numbers.

The formula, with a run held against it, is docs/scaling.md. After Strom (2015), whose messages are
sparse, and DL4J's documents; what is reckoned is this implementation: ``publish_every="auto"``,
``max_lead=1``, ``max_staleness="auto"``, and a dense ring all-reduce beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

from sparkstrom.codec.frames import OVERHEAD_BYTES
from sparkstrom.encoding.forms import prefers_bitmap
from sparkstrom.encoding.gaps import rice_guess
from sparkstrom.protocol.common.send_window import HEADER_BYTES, WINDOW_FIRST, entries_in_sum
from sparkstrom.protocol.common.topology import FAN_OUT
from sparkstrom.spark.driver.options import need, need_seconds, need_whole
from sparkstrom.spark.executor.tasks import AGE

AMOUNT_BITS = 0.6  # of an entry: by how many thresholds it moves
WIRE = 1.06  # UDP, IP, Ethernet and Aeron's own headers over what they carry
# Of one core of a Xeon of 2023. By benchmarks.encode, at 1 M and 25 M parameters:
SAMPLE_S = 0.6e-3  # for a publication's threshold
SCAN_S = 0.8e-9  # per parameter, for the publication
HIT_S = 25e-9  # per entry of it
ADD_S = 30e-9  # per entry of others, decoded and added
# By benchmarks.relay_fan, with 1 and 16 children, updates of 1 and 64 KiB:
OPEN_S = 0.8e-9  # of whoever hands on an update, per byte of it
SEAL_S = 0.13e-9  # the same, for each that it is handed to
FEED_S = 0.012e-3  # and for each, whatever its size
# Between that benchmark's 0.03 ms and the 0.65 ms of a driver's thread, polling included, in a fit:
COMMIT_S = 0.25e-3  # of whoever hands on an update, once
CONTROL_UP = 8e3  # bytes a second, by benchmarks.scaling: heartbeats and Aeron's own, of a worker
CONTROL_DOWN = 5e3  # and of the driver, to each under it
HOP_S = 1.5e-3  # until a thread has seen what came, one way: two workers, steps of 2 ms
BACKWARD = 2 / 3  # of a dense step, beside which its all-reduce runs
F32_BYTES = 4
PAYS = 0.5  # of a worker that one more has to bring, on average
LinkBytes = tuple[float, float, float, float]  # a worker's sent and received, the driver's
# What is waited for, beside links and the driver's processor.
THE_STEP, LATENCY, PROCESSOR = "the step", "latency", "a worker's processor"


@dataclass(frozen=True, slots=True)
class Work:
    """What each worker does, sends, and sends it over. Raises UsageError for what cannot be."""

    n_params: int
    step_s: float  # of one worker alone, without sharing
    density: float  # entries of an update per parameter
    link_bits_s: float  # of each host, each way
    latency_s: float  # one way
    fan_out: int = FAN_OUT  # of a mesh
    beside_driver: int = 0  # workers on the driver's host, which its link does not see
    spread: float = 0.0  # standard deviation of a step, of its mean
    encoding_s: float | None = None  # of a publication; None: from the parameters

    def __post_init__(self) -> None:
        need_whole("params", self.n_params, 1)
        need_seconds("step", self.step_s)
        need(0 < self.density <= 1, "density", self.density, "must be above 0 and at most 1")
        need(self.link_bits_s > 0, "link", self.link_bits_s, "must be above 0")
        need(0 <= self.latency_s < math.inf, "latency", self.latency_s, "must be 0 or more seconds")
        need_whole("fan_out", self.fan_out, 1)
        need_whole("beside_driver", self.beside_driver, 0)
        need(0 <= self.spread < 1, "spread", self.spread, "must be from 0 to below 1")
        encoding_s = self.encoding_s or 0.0
        need(0 <= encoding_s < math.inf, "encoding", encoding_s, "must be 0 or more seconds")

    @property
    def entries(self) -> int:
        """Of an update."""
        return max(1, round(self.n_params * self.density))

    @property
    def publication_s(self) -> float:
        """Of a worker's processor, for an update of its own."""
        if self.encoding_s is not None:
            return self.encoding_s
        return SAMPLE_S + SCAN_S * self.n_params + HIT_S * self.entries

    @property
    def update_bytes(self) -> float:
        """On the wire."""
        return wire_bytes(payload_bytes(self.entries, self.n_params))

    def fed_bytes(self, updates: int) -> float:
        """On the wire, for so many updates of others.

        What fits into a window goes one by one, what has to wait as a sum where it is less.
        """
        each = updates * self.update_bytes
        if each <= WINDOW_FIRST:
            return each
        entries = updates * self.entries
        different = entries_in_sum(entries, self.n_params)
        more_bits = math.log2(entries / different)  # of an amount that is a sum
        sparse = gaps_bytes(different, self.n_params, AMOUNT_BITS + more_bits)
        together = min(sparse, F32_BYTES * self.n_params)
        return min(each, wire_bytes(together))


def payload_bytes(entries: int, n_params: int) -> float:
    """Of an update: gaps, or a bitmap of two bits a parameter."""
    if prefers_bitmap(entries, n_params):
        return n_params / 4
    return gaps_bytes(entries, n_params)


def gaps_bytes(entries: int, n_params: int, amount_bits: float = AMOUNT_BITS) -> float:
    """Of entries spread evenly: Rice-coded gaps, with a sign and an amount each.

    A gap is geometric; ``rice`` bits of it are written as they are, the rest as that many zeros.
    """
    rice = rice_guess(entries, n_params)
    beyond = (1 - entries / n_params) ** (1 << rice)  # that a gap has another zero
    return entries * (rice + 2 + beyond / (1 - beyond) + amount_bits) / 8


def wire_bytes(payload: float) -> float:
    """With its message, its frames' seals, and the headers of datagrams."""
    return WIRE * (payload + HEADER_BYTES + OVERHEAD_BYTES)


@dataclass(frozen=True, slots=True)
class Load:
    """A round, in which every worker publishes once: bytes of the busiest hosts, and the way."""

    root_in: float
    root_out: float
    worker_in: float  # of the busiest worker
    worker_out: float
    at_root: int  # workers that the root's link leads to
    children: int  # of the busiest worker
    root_s: float  # of the root's processor
    hops: int  # from the root to the furthest worker

    def with_control(self, step_s: float) -> LinkBytes:
        """Bytes that the busiest worker and the driver send and receive, with those of so long."""
        up, down = CONTROL_UP * step_s, CONTROL_DOWN * step_s
        return (
            self.worker_out + up + self.children * down,
            self.worker_in + down + self.children * up,
            self.root_out + self.at_root * down,
            self.root_in + self.at_root * up,
        )

    def taken_s(self, link_bits_s: float) -> tuple[float, float]:
        """How long a worker's and the driver's link have to carry it, beside what is always there.

        That is at most nine tenths of a link.
        """
        carried, control = self.with_control(0.0), self.with_control(1.0)
        each = []
        for count, more in zip(carried, control, strict=True):
            free = link_bits_s / 8 - (more - count)
            each.append(count / max(free, link_bits_s / 80))
        return max(each[:2]), max(each[2:])


def star(work: Work, workers: int) -> Load:
    """Everybody under the driver: ``mesh_build_mode="plain"``."""
    return _load(work, workers, fan_out=workers)


def mesh(work: Work, workers: int) -> Load:
    """Workers under one another; nothing is summed on the way up."""
    return _load(work, workers, fan_out=work.fan_out)


def _load(work: Work, workers: int, fan_out: int) -> Load:
    fed, update = work.fed_bytes(workers - 1), work.update_bytes
    beside = min(work.beside_driver, workers)
    at_root = max(0, min(fan_out, workers) - beside)
    below = _below(1, fan_out, workers)  # place 1 has the most below it
    children = min(fan_out, below)
    updates = min(workers - 1, math.ceil(fed / update))
    per_update = COMMIT_S + ADD_S * work.entries + OPEN_S * update
    return Load(
        root_in=(workers - beside) * update,
        root_out=at_root * fed,
        worker_in=fed + below * update,
        worker_out=(below + 1) * update + children * fed,
        at_root=at_root,
        children=children,
        root_s=workers * per_update + min(fan_out, workers) * (updates * FEED_S + fed * SEAL_S),
        hops=_depth(workers, fan_out),
    )


def _below(place: int, fan_out: int, workers: int) -> int:
    """Workers in the tree under a place, which is not counted; places are 1 to ``workers``."""
    if fan_out == 1:
        return max(0, workers - place)  # a chain, which may be long
    count, first, last = 0, place, place
    while (first := fan_out * first + 1) <= workers:
        last = fan_out * last + fan_out
        count += min(last, workers) - first + 1
    return count


def _depth(workers: int, fan_out: int) -> int:
    if fan_out == 1:
        return workers
    depth, capacity = 1, fan_out
    while capacity < workers:
        depth += 1
        capacity += fan_out**depth
    return depth


@dataclass(frozen=True, slots=True)
class WorkerPace:
    """What so many workers come to."""

    workers: int
    step_s: float  # from one minibatch of a worker to its next
    efficiency: float  # of a worker, against one machine alone
    speedup: float  # minibatches per second, against one machine alone
    limited_by: str
    worker_sent: float  # bytes per step, of the busiest worker's host
    worker_received: float
    driver_sent: float
    driver_received: float
    round_s: float = 0.0  # from an update to its commit
    steps_per_update: int = 1
    staleness: float = 0.0  # minibatches of others that a gradient did not know when it came, mean

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def shared(work: Work, load: Load, workers: int) -> WorkerPace:
    """Gradient sharing: all take a step together, and updates travel beside the steps.

    Words of who has taken a step go over the same links, so a step takes what its updates do there.
    A worker publishes at the end of the first step after its last update's commit. With ``beside``
    steps taken since that update, it waits for the commit first.
    """
    if workers == 1:
        sent = work.update_bytes
        limit = THE_STEP if work.step_s >= work.publication_s else PROCESSOR
        return _pace(work, 1, work.step_s + work.publication_s, limit, (sent, 0.0, 0.0, sent))
    worker_s, driver_s = load.taken_s(work.link_bits_s)
    takes_s = {
        "the driver's link": driver_s,
        "a worker's link": worker_s,
        "the driver's processor": load.root_s,
    }
    there_and_back_s = 2 * load.hops * (work.latency_s + HOP_S)
    forwarding_s = (2 * load.hops - 1) * work.update_bytes * 8 / work.link_bits_s
    widest = max(takes_s, key=takes_s.__getitem__)
    taken_s = takes_s[widest]
    round_s = taken_s + forwarding_s + there_and_back_s  # of whose turn is last
    mean_s = round_s - taken_s / 2
    apply_s = ADD_S * work.entries * (workers - 1) + work.publication_s
    slowest_s = work.step_s * (1 + work.spread * _above_mean(workers))
    beside = max(0, AGE // workers - 1)

    def step_with(steps: int) -> float:
        return max(slowest_s + there_and_back_s + apply_s / steps, taken_s / steps)

    steps = 1
    while steps <= beside and mean_s > steps * step_with(steps):
        steps += 1
    step_s = step_with(steps)
    late_s = round_s if beside == 0 else mean_s
    if late_s > beside * step_s:  # what all wait for, they need not hear of by itself
        step_s = max(step_s, (late_s + slowest_s + apply_s) / steps)
    waited_s = {THE_STEP: slowest_s, LATENCY: there_and_back_s, PROCESSOR: apply_s / steps}
    if step_s > sum(waited_s.values()):  # for updates; what they were waiting for
        waited_s = {widest: taken_s, LATENCY: there_and_back_s}
    limit = max(waited_s, key=waited_s.__getitem__)
    pace = _pace(work, workers, step_s, limit, _per(steps, load.with_control(steps * step_s)))
    stale = (workers - 1) * (steps - 0.5)
    return replace(pace, round_s=round_s, steps_per_update=steps, staleness=stale)


def ring(work: Work, workers: int) -> WorkerPace:
    """Synchronous SGD with a dense ring all-reduce beside the backward pass, as DDP has it."""
    if workers == 1:
        return _pace(work, 1, work.step_s, THE_STEP, (0.0, 0.0, 0.0, 0.0))
    each_way = 2 * (workers - 1) / workers * F32_BYTES * work.n_params * WIRE
    reduce_s = each_way * 8 / work.link_bits_s + 2 * (workers - 1) * work.latency_s
    slowest_s = work.step_s * (1 + work.spread * _above_mean(workers))
    hidden_s = BACKWARD * work.step_s
    step_s = slowest_s + max(0.0, reduce_s - hidden_s)
    limit = "the links" if reduce_s > hidden_s else THE_STEP
    pace = _pace(work, workers, step_s, limit, (each_way, each_way, 0.0, 0.0))
    return replace(pace, round_s=reduce_s)


def _pace(work: Work, workers: int, step_s: float, limit: str, link_bytes: LinkBytes) -> WorkerPace:
    efficiency = work.step_s / step_s
    return WorkerPace(workers, step_s, efficiency, workers * efficiency, limit, *link_bytes)


def _per(steps: int, at: LinkBytes) -> LinkBytes:
    worker_sent, worker_received, driver_sent, driver_received = (count / steps for count in at)
    return worker_sent, worker_received, driver_sent, driver_received


def _above_mean(workers: int) -> float:
    """The slowest of so many normal steps, in standard deviations (Blom 1958)."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


WAYS: dict[str, Callable[[Work, int], WorkerPace]] = {
    "star": lambda work, workers: shared(work, star(work, workers), workers),
    "mesh": lambda work, workers: shared(work, mesh(work, workers), workers),
    "ring": ring,
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """Each way to share, over numbers of workers; in the order of ``workers``."""

    work: Work
    workers: Sequence[int]
    paces: dict[str, list[WorkerPace]]

    def best(self, way: str) -> int:
        """The number of workers that has most minibatches a second; the least, where it is even.

        1 where none has more than one machine alone.
        """
        most = max(self.paces[way], key=lambda pace: (round(pace.speedup, 9), -pace.workers))
        return most.workers if most.speedup > 1 else 1

    def pays_up_to(self, way: str) -> int:
        """The last number that brings at least half a worker for each more than the one before.

        The first number counts from one machine alone, whether 1 is asked for or not. A mesh's next
        level begins with a dent, after which it goes on.
        """
        workers, speedup = 1, 1.0
        for pace in self.paces[way]:
            if pace.speedup - speedup >= PAYS * (pace.workers - workers):
                workers, speedup = pace.workers, pace.speedup
        return workers

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: times in seconds, sizes in bytes, rates in bits per second."""
        work = self.work
        return {
            "params": work.n_params,
            "step_s": work.step_s,
            "density": work.density,
            "link_bits_s": work.link_bits_s,
            "latency_s": work.latency_s,
            "fan_out": work.fan_out,
            "spread": work.spread,
            "update_bytes": round(work.update_bytes),
            "encoding_s": work.publication_s,
            "best_workers": {way: self.best(way) for way in self.paces},
            "pays_up_to": {way: self.pays_up_to(way) for way in self.paces},
            "rows": [
                {"workers": count} | {way: self.paces[way][row].to_dict() for way in self.paces}
                for row, count in enumerate(self.workers)
            ],
        }


def scaling_of(work: Work, workers: Sequence[int]) -> Scaling:
    """All ways, for each of these numbers of workers, in ascending order.

    Raises UsageError for none, and for numbers below 1.
    """
    need(bool(workers), "workers", list(workers), "there must be at least one number")
    for count in workers:
        need_whole("workers", count, 1)
    counts = sorted(set(workers))
    paces = {way: [pace(work, count) for count in counts] for way, pace in WAYS.items()}
    return Scaling(work, counts, paces)
