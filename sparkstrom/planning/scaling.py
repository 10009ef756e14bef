"""Predict step time, efficiency and staleness for k workers from a few measured numbers.

Workers publish updates, that is, send them towards the driver, the root of the tree of workers. An
update is committed once the driver has numbered it. Staleness is the number of other workers'
minibatches that are missing from the parameters with which a worker computes a gradient.

``predict_scaling`` predicts gradient sharing and, for comparison, a dense ring all-reduce. It
assumes ``max_lead=1`` (workers start each step together), ``publish_every="auto"`` (workers publish
after each step if links are fast enough), and ``max_staleness="auto"``. With the default
``max_lead="auto"``, fits of up to three workers with short steps are faster than predicted.
docs/scaling.md explains the formula and compares it with a run. ``measure_script`` measures a
model's step and the encoding of its updates on this machine.
"""

from __future__ import annotations

import math
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.codec.sealed_frames import OVERHEAD_BYTES
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import prefers_bitmap
from sparkstrom.encoding.gaps import rice_guess
from sparkstrom.encoding.grid import first_exponent, round_to_grid
from sparkstrom.encoding.thresholds import AutoThreshold
from sparkstrom.models.base import Batch, FlatModel, arrays_of, explain_invalid_model, map_columns
from sparkstrom.observe.reporting.summary_rendering import ROUNDED_UP
from sparkstrom.options.common import require, require_seconds, require_whole
from sparkstrom.options.gradient_sharing import STALENESS_TARGET
from sparkstrom.protocol.common.flow_control import HEADER_BYTES, WINDOW_FIRST, entries_in_sum
from sparkstrom.protocol.common.topology import FAN_OUT

AMOUNT_BITS = 0.6  # bits per entry for the number of thresholds by which it moves
WIRE_OVERHEAD = 1.06  # bytes with UDP, IP, Ethernet and Aeron headers, per byte of content
# Times on one core of a Xeon of 2023, measured by benchmarks.encode with 1 M and 25 M parameters:
SAMPLE_S = 0.6e-3  # to sample the threshold of an update
SCAN_S = 0.8e-9  # per parameter, to scan the residual
ENCODE_ENTRY_S = 25e-9  # per entry, to encode it
ADD_ENTRY_S = 30e-9  # per entry of another worker's update, to decode and add it
# The same, measured by benchmarks.relay_fan with 1 and 16 children, updates of 1 and 64 KiB:
DECRYPT_BYTE_S = 0.8e-9  # per byte of an update, to decrypt it in a node that relays it
ENCRYPT_BYTE_S = 0.13e-9  # per byte and child, to encrypt it again
FORWARD_S = 0.012e-3  # per message and child, regardless of its size
# Per update, in a node that relays it: between 0.03 ms in that benchmark and 0.65 ms of the
# driver's thread in a fit, which includes polling.
COMMIT_S = 0.25e-3
CONTROL_UP = 8e3  # bytes/s that a worker sends without updates; measured by benchmarks.scaling
CONTROL_DOWN = 5e3  # bytes/s that the driver sends to each child without updates
HOP_S = 1.5e-3  # until a thread polls an arrived message; from two workers with steps of 2 ms
OVERLAP_SHARE = 2 / 3  # share of a dense step that overlaps with its all-reduce
F32_BYTES = 4
WORTHWHILE_SPEEDUP = 0.5  # speedup that one more worker must add on average to be worthwhile
# Bytes that the busiest worker sends and receives, and that the driver sends and receives.
LinkBytes = tuple[float, float, float, float]
# Bottlenecks besides the links and the driver's processor.
STEP, LATENCY, PROCESSOR = "the step", "latency", "a worker's processor"


@dataclass(frozen=True, slots=True)
class ScalingInputs:
    """The inputs of the prediction: a worker's step, its updates and the network.

    Raises UsageError for impossible numbers.
    """

    n_params: int  # number of parameters of the model
    step_s: float  # time of a step of one worker alone, without sharing
    density: float  # parameters that an update changes / all parameters
    link_bits_s: float  # bit rate of each host's link, each way
    latency_s: float  # of the network, one way
    fan_out: int = FAN_OUT  # maximum number of children of a node in a mesh
    beside_driver: int = 0  # number of workers on the driver's host, which do not use its link
    spread: float = 0.0  # standard deviation of a step's time, relative to its mean
    encoding_s: float | None = None  # to encode an update; None: estimated from the parameters

    def __post_init__(self) -> None:
        require_whole("params", self.n_params, 1)
        require_seconds("step", self.step_s)
        require(0 < self.density <= 1, "density", self.density, "must be above 0 and at most 1")
        require(self.link_bits_s > 0, "link", self.link_bits_s, "must be above 0")
        require(
            0 <= self.latency_s < math.inf, "latency", self.latency_s, "must be 0 or more seconds"
        )
        require_whole("fan_out", self.fan_out, 1)
        require_whole("beside_driver", self.beside_driver, 0)
        require(0 <= self.spread < 1, "spread", self.spread, "must be from 0 to below 1")
        encoding_s = self.encoding_s or 0.0
        require(0 <= encoding_s < math.inf, "encoding", encoding_s, "must be 0 or more seconds")

    @property
    def entries(self) -> int:
        """Number of parameters that an update changes."""
        return max(1, round(self.n_params * self.density))

    @property
    def publish_cpu_s(self) -> float:
        """Processor time that a worker needs to encode an update, in seconds."""
        if self.encoding_s is not None:
            return self.encoding_s
        return SAMPLE_S + SCAN_S * self.n_params + ENCODE_ENTRY_S * self.entries

    @property
    def update_bytes(self) -> float:
        """Number of bytes that an update has on the network, with all headers."""
        return wire_bytes(payload_bytes(self.entries, self.n_params))

    def received_bytes(self, updates: int) -> float:
        """Return how many bytes one worker receives for ``updates`` updates of other workers.

        Updates that fit into the flow-control window are sent one by one. Updates that must wait
        are added up and sent as a sum, if that is smaller.
        """
        separate = updates * self.update_bytes
        if separate <= WINDOW_FIRST:
            return separate
        entries = updates * self.entries
        distinct = entries_in_sum(entries, self.n_params)
        more_bits = math.log2(entries / distinct)  # a sum's amounts are larger
        sparse = gaps_bytes(distinct, self.n_params, AMOUNT_BITS + more_bits)
        return min(separate, wire_bytes(min(sparse, F32_BYTES * self.n_params)))


def payload_bytes(entries: int, n_params: int) -> float:
    """Return the size in bytes of an update that is encoded as gaps between entries or as a bitmap.

    Encoders use a bitmap if it is shorter, which is so if many parameters are entries.
    """
    if prefers_bitmap(entries, n_params):
        return n_params / 4
    return gaps_bytes(entries, n_params)


def gaps_bytes(entries: int, n_params: int, amount_bits: float = AMOUNT_BITS) -> float:
    """Return the expected size in bytes of ``entries`` random entries, encoded as Rice-coded gaps.

    Each entry also has a sign and an amount, which takes ``amount_bits`` bits. Gaps are
    geometrically distributed. The lower ``rice`` bits of a gap are written in binary, the others in
    unary.
    """
    rice = rice_guess(entries, n_params)
    # Probability that a gap needs another unary digit.
    beyond = (1 - entries / n_params) ** (1 << rice)
    return entries * (rice + 2 + beyond / (1 - beyond) + amount_bits) / 8


def wire_bytes(payload: float) -> float:
    """Return a payload's size with message header, frame seals and datagram headers."""
    return WIRE_OVERHEAD * (payload + HEADER_BYTES + OVERHEAD_BYTES)


@dataclass(frozen=True, slots=True)
class NetworkLoad:
    """Network and processor load while every worker publishes one update; sizes in bytes."""

    root_in: float  # bytes that the driver, the root of the tree, receives
    root_out: float  # bytes that the driver sends
    worker_in: float  # bytes that the busiest worker receives
    worker_out: float  # bytes that the busiest worker sends
    at_root: int  # number of the driver's children on other hosts
    children: int  # number of the busiest worker's children
    root_s: float  # processor time of the driver
    hops: int  # number of edges from the driver to the furthest worker

    def with_control(self, step_s: float) -> LinkBytes:
        """Return the bytes on each link, including the control messages of ``step_s`` seconds."""
        up, down = CONTROL_UP * step_s, CONTROL_DOWN * step_s
        return (
            self.worker_out + up + self.children * down,
            self.worker_in + down + self.children * up,
            self.root_out + self.at_root * down,
            self.root_in + self.at_root * up,
        )

    def link_times_s(self, link_bits_s: float) -> tuple[float, float]:
        """Return the seconds that links need for the load, as (busiest worker's, driver's).

        A link carries ``link_bits_s`` bits per second in each direction; the slower direction
        counts. The rate of control messages is subtracted first, at most nine tenths of the link.
        """
        load, with_control = self.with_control(0.0), self.with_control(1.0)
        times_s = []
        for count, more in zip(load, with_control, strict=True):
            free = link_bits_s / 8 - (more - count)
            times_s.append(count / max(free, link_bits_s / 80))
        return max(times_s[:2]), max(times_s[2:])


def star_load(inputs: ScalingInputs, workers: int) -> NetworkLoad:
    """Return the load if all workers are children of the driver (mesh_build_mode="plain")."""
    return _tree_load(inputs, workers, fan_out=workers)


def mesh_load(inputs: ScalingInputs, workers: int) -> NetworkLoad:
    """Return the load if workers form a tree with ``fan_out`` children per node.

    No worker sums updates on their way to the root.
    """
    return _tree_load(inputs, workers, fan_out=inputs.fan_out)


def _tree_load(inputs: ScalingInputs, workers: int, fan_out: int) -> NetworkLoad:
    """Return the load of a tree with ``fan_out`` children per node, whose root is the driver."""
    received, update = inputs.received_bytes(workers - 1), inputs.update_bytes
    beside = min(inputs.beside_driver, workers)
    at_root = max(0, min(fan_out, workers) - beside)
    below = _count_descendants(1, fan_out, workers)  # place 1 has the most descendants
    children = min(fan_out, below)
    updates = min(workers - 1, math.ceil(received / update))
    per_update = COMMIT_S + ADD_ENTRY_S * inputs.entries + DECRYPT_BYTE_S * update
    return NetworkLoad(
        root_in=(workers - beside) * update,
        root_out=at_root * received,
        worker_in=received + below * update,
        worker_out=(below + 1) * update + children * received,
        at_root=at_root,
        children=children,
        root_s=workers * per_update
        + min(fan_out, workers) * (updates * FORWARD_S + received * ENCRYPT_BYTE_S),
        hops=_tree_depth(workers, fan_out),
    )


def _count_descendants(place: int, fan_out: int, workers: int) -> int:
    """Return the number of descendants of a node in a complete tree.

    ``place`` is the node's number, from 1 to ``workers`` in breadth-first order without the root.
    """
    if fan_out == 1:
        return max(0, workers - place)  # a chain, which may be long
    count, first, last = 0, place, place
    while (first := fan_out * first + 1) <= workers:
        last = fan_out * last + fan_out
        count += min(last, workers) - first + 1
    return count


def _tree_depth(workers: int, fan_out: int) -> int:
    """Return the depth of a complete tree with ``workers`` nodes below its root."""
    if fan_out == 1:
        return workers
    depth, capacity = 1, fan_out
    while capacity < workers:
        depth += 1
        capacity += fan_out**depth
    return depth


@dataclass(frozen=True, slots=True)
class ThroughputPrediction:
    """The predicted performance of a number of workers."""

    workers: int  # number of workers
    step_s: float  # from one minibatch of a worker to its next
    efficiency: float  # of a worker, relative to one machine alone
    speedup: float  # of minibatches per second, relative to one machine alone
    limited_by: str  # name of the bottleneck, for users
    worker_sent: float  # bytes per step, of the busiest worker's host
    worker_received: float  # bytes per step, of the busiest worker's host
    driver_sent: float  # bytes per step, of the driver's host
    driver_received: float  # bytes per step, of the driver's host
    round_s: float = 0.0  # from sending an update to its commit; in a ring: time of an all-reduce
    steps_per_update: int = 1  # steps from one update of a worker to its next
    # Mean number of the other workers' minibatches that a gradient's parameters lack.
    staleness: float = 0.0


def predict_gradient_sharing(
    inputs: ScalingInputs, load: NetworkLoad, workers: int
) -> ThroughputPrediction:
    """Predict gradient sharing, in which workers take steps and send updates at the same time.

    ``load`` is the load of the tree that connects the workers (``star_load`` or ``mesh_load``).
    Progress reports use the same links as updates, so a step takes at least as long as the links
    need for its updates. A worker publishes at the end of the first step after its previous update
    was committed. If it has taken as many steps since that update as staleness allows, it waits for
    the commit.
    """
    if workers == 1:
        sent = inputs.update_bytes
        limit = STEP if inputs.step_s >= inputs.publish_cpu_s else PROCESSOR
        return _make_prediction(
            inputs, 1, inputs.step_s + inputs.publish_cpu_s, limit, (sent, 0.0, 0.0, sent)
        )
    worker_s, driver_s = load.link_times_s(inputs.link_bits_s)
    transfer_times_s = {
        "the driver's link": driver_s,
        "a worker's link": worker_s,
        "the driver's processor": load.root_s,
    }
    there_and_back_s = 2 * load.hops * (inputs.latency_s + HOP_S)
    forwarding_s = (2 * load.hops - 1) * inputs.update_bytes * 8 / inputs.link_bits_s
    slowest = max(transfer_times_s, key=transfer_times_s.__getitem__)
    transfer_s = transfer_times_s[slowest]
    round_s = transfer_s + forwarding_s + there_and_back_s  # for the worker that is served last
    mean_s = round_s - transfer_s / 2
    apply_s = ADD_ENTRY_S * inputs.entries * (workers - 1) + inputs.publish_cpu_s
    slowest_s = inputs.step_s * (1 + inputs.spread * _expected_maximum(workers))
    steps_max = max(0, STALENESS_TARGET // workers - 1)  # while an update is not committed

    def step_with(steps: int) -> float:
        return max(slowest_s + there_and_back_s + apply_s / steps, transfer_s / steps)

    steps = 1
    while steps <= steps_max and mean_s > steps * step_with(steps):
        steps += 1
    step_s = step_with(steps)
    late_s = round_s if steps_max == 0 else mean_s
    if late_s > steps_max * step_s:  # workers wait for commits and send no separate reports
        step_s = max(step_s, (late_s + slowest_s + apply_s) / steps)
    waited_s = {STEP: slowest_s, LATENCY: there_and_back_s, PROCESSOR: apply_s / steps}
    if step_s > sum(waited_s.values()):  # the updates are the bottleneck, so name what delays them
        waited_s = {slowest: transfer_s, LATENCY: there_and_back_s}
    limit = max(waited_s, key=waited_s.__getitem__)
    link_bytes = _divide_link_bytes(load.with_control(steps * step_s), steps)
    pace = _make_prediction(inputs, workers, step_s, limit, link_bytes)
    stale = (workers - 1) * (steps - 0.5)
    return replace(pace, round_s=round_s, steps_per_update=steps, staleness=stale)


def predict_ring_allreduce(inputs: ScalingInputs, workers: int) -> ThroughputPrediction:
    """Predict synchronous SGD with a dense ring all-reduce during the backward pass, as in DDP."""
    if workers == 1:
        return _make_prediction(inputs, 1, inputs.step_s, STEP, (0.0, 0.0, 0.0, 0.0))
    each_way = 2 * (workers - 1) / workers * F32_BYTES * inputs.n_params * WIRE_OVERHEAD
    reduce_s = each_way * 8 / inputs.link_bits_s + 2 * (workers - 1) * inputs.latency_s
    slowest_s = inputs.step_s * (1 + inputs.spread * _expected_maximum(workers))
    hidden_s = OVERLAP_SHARE * inputs.step_s
    step_s = slowest_s + max(0.0, reduce_s - hidden_s)
    limit = "the links" if reduce_s > hidden_s else STEP
    pace = _make_prediction(inputs, workers, step_s, limit, (each_way, each_way, 0.0, 0.0))
    return replace(pace, round_s=reduce_s)


def _make_prediction(
    inputs: ScalingInputs, workers: int, step_s: float, limit: str, link_bytes: LinkBytes
) -> ThroughputPrediction:
    """Return the prediction for a step time; ``limit`` names the bottleneck.

    Efficiency and speedup are relative to one machine alone, whose step takes ``inputs.step_s``.
    """
    efficiency = inputs.step_s / step_s
    return ThroughputPrediction(
        workers, step_s, efficiency, workers * efficiency, limit, *link_bytes
    )


def _divide_link_bytes(link_bytes: LinkBytes, steps: int) -> LinkBytes:
    """Return the bytes per step, given those of several steps."""
    worker_sent, worker_received, driver_sent, driver_received = link_bytes
    return (
        worker_sent / steps,
        worker_received / steps,
        driver_sent / steps,
        driver_received / steps,
    )


def _expected_maximum(workers: int) -> float:
    """Return the expected maximum of ``workers`` standard normal values (Blom 1958)."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


TOPOLOGIES: dict[str, Callable[[ScalingInputs, int], ThroughputPrediction]] = {
    "star": lambda inputs, workers: predict_gradient_sharing(
        inputs, star_load(inputs, workers), workers
    ),
    "mesh": lambda inputs, workers: predict_gradient_sharing(
        inputs, mesh_load(inputs, workers), workers
    ),
    "ring": predict_ring_allreduce,
}


@dataclass(frozen=True, slots=True)
class ScalingPrediction:
    """Predictions for each topology and each number of workers."""

    inputs: ScalingInputs  # what the predictions are based on
    workers: Sequence[int]  # numbers of workers, ascending
    # Predictions by topology ("star", "mesh", "ring"), in the order of ``workers``.
    paces: dict[str, list[ThroughputPrediction]]

    def best(self, topology: str) -> int:
        """Return the smallest number of workers with the most minibatches per second.

        Return 1 if no number is faster than one machine alone.
        """
        most = max(self.paces[topology], key=lambda pace: (round(pace.speedup, 9), -pace.workers))
        return most.workers if most.speedup > 1 else 1

    def pays_up_to(self, topology: str) -> int:
        """Return the largest number of workers that is worthwhile.

        Compared with the previous worthwhile number, at first 1, each additional worker must add
        WORTHWHILE_SPEEDUP on average. Speedup drops where a mesh begins another level and rises
        again afterwards, so the search does not end there.
        """
        workers, speedup = 1, 1.0
        for pace in self.paces[topology]:
            if pace.speedup - speedup >= WORTHWHILE_SPEEDUP * (pace.workers - workers):
                workers, speedup = pace.workers, pace.speedup
        return workers

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as a dictionary for JSON, in seconds, bytes and bits per second."""
        inputs = self.inputs
        return {
            "params": inputs.n_params,
            "step_s": inputs.step_s,
            "density": inputs.density,
            "link_bits_s": inputs.link_bits_s,
            "latency_s": inputs.latency_s,
            "fan_out": inputs.fan_out,
            "spread": inputs.spread,
            "update_bytes": round(inputs.update_bytes),
            "encoding_s": inputs.publish_cpu_s,
            "best_workers": {topology: self.best(topology) for topology in self.paces},
            "pays_up_to": {topology: self.pays_up_to(topology) for topology in self.paces},
            "rows": [
                {"workers": count}
                | {topology: asdict(self.paces[topology][row]) for topology in self.paces}
                for row, count in enumerate(self.workers)
            ],
        }


def predict_scaling(inputs: ScalingInputs, workers: Sequence[int]) -> ScalingPrediction:
    """Predict all topologies for each of these numbers of workers, in ascending order.

    Raise UsageError if there is no number, or one below 1.
    """
    require(bool(workers), "workers", list(workers), "there must be at least one number")
    for count in workers:
        require_whole("workers", count, 1)
    counts = sorted(set(workers))
    paces = {
        topology: [pace(inputs, count) for count in counts] for topology, pace in TOPOLOGIES.items()
    }
    return ScalingPrediction(inputs, counts, paces)


TITLES = {"star": "star (plain)", "mesh": "mesh", "ring": "dense all-reduce (ring)"}
HEADER = (
    "workers  per step  efficiency  speedup  staleness  link bytes of a worker, driver  waits for"
)


def format_scaling(scaling: ScalingPrediction) -> str:
    """Return a prediction as text: a table for each topology, with the best number of workers."""
    inputs = scaling.inputs
    lines = [
        f"{inputs.n_params:,} parameters, {_format_time(inputs.step_s)} a step; an update has "
        f"{inputs.entries:,} entries, {_format_bytes(inputs.update_bytes)} on the wire, and takes "
        f"{_format_time(inputs.publish_cpu_s)} to encode; links of "
        f"{_format_rate(inputs.link_bits_s)}, {_format_time(inputs.latency_s)} one way."
    ]
    for topology, title in TITLES.items():
        lines += ["", *_format_table(scaling, topology, title)]
    lines += [
        "",
        "Efficiency and speedup are against one machine alone, in minibatches per second.",
    ]
    return "\n".join(lines)


def _format_table(scaling: ScalingPrediction, topology: str, title: str) -> list[str]:
    """Return the lines of one topology's table."""
    best, pays = scaling.best(topology), scaling.pays_up_to(topology)
    shown = [
        pace for pace in scaling.paces[topology] if _is_shown(pace.workers, scaling, best, pays)
    ]
    lines = [title, HEADER]
    lines += [
        f"{pace.workers:7,}  {_format_time(pace.step_s):>8}  {pace.efficiency:9.0%}  "
        f"{pace.speedup:7.1f}  {_format_staleness(pace):>9}  "
        f"{_format_bytes_per_step(pace):>30}  {pace.limited_by}"
        for pace in shown
    ]
    lines.append(_format_verdict(best, pays, scaling.workers[-1]))
    return lines


def _format_verdict(best: int, pays: int, last: int) -> str:
    """Return the line under a table: the best number of workers, and the largest worthwhile one."""
    if best == 1:
        return "one machine alone is faster: none of these numbers of workers pays"
    upto = "to the last of them" if pays == last else f"up to {pays:,}"
    brings = f"each more brings at least half of one, on average, {upto}"
    if pays == 1:
        brings = "each more than one machine brings less than half of one, on average"
    return f"most minibatches per second: {best:,} workers; {brings}"


def _is_shown(workers: int, scaling: ScalingPrediction, best: int, pays: int) -> bool:
    """Return whether tables show this number of workers; of more than 8, they show only some.

    Those are the first and the last, powers of two, ``best`` and ``pays``.
    """
    ends = scaling.workers[0], scaling.workers[-1], best, pays
    return workers in ends or workers & (workers - 1) == 0 or len(scaling.workers) <= 8


def _format_staleness(pace: ThroughputPrediction) -> str:
    """Return the staleness with one digit, or "none"."""
    return f"{pace.staleness:.1f}" if pace.staleness else "none"


def _format_bytes_per_step(pace: ThroughputPrediction) -> str:
    """Format bytes sent plus received per step, of the busiest worker and of the driver."""
    worker = pace.worker_sent + pace.worker_received
    driver = pace.driver_sent + pace.driver_received
    return f"{_format_bytes(worker)}, {_format_bytes(driver)}"


def _format_time(seconds: float) -> str:
    """Format a time in s or ms."""
    if seconds >= ROUNDED_UP:
        return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
    return f"{1e3 * seconds:.3g} ms"


def _format_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= ROUNDED_UP * factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _format_rate(bits: float) -> str:
    """Format a number of bits per second with a decimal unit."""
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= ROUNDED_UP * factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


WARM_STEPS, STEPS_MIN, STEPS_MAX = 3, 8, 50  # the first WARM_STEPS steps are not counted
BUDGET_S = 10.0  # time after which no step beyond STEPS_MIN is measured
SCRIPT_REQUIREMENTS = (
    "a script that leaves `model`, as SparkNetwork takes it, and `batch`, (features, labels)"
)


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Measured times, in seconds, of a model's training step and of encoding its update."""

    n_params: int  # number of parameters of the model
    step_s: float  # median time of a step
    encoding_s: float  # median time to encode an update


def measure_script(path: Path, density: float) -> StepMeasurement:
    """Run a script and measure the ``model`` and ``batch`` that it defines.

    Args:
        path: The script.
        density: Parameters that an update changes / all parameters.

    Raises:
        UsageError: The script does not exist or defines no usable model and batch. Exceptions of
            the script are raised unchanged.
    """
    if not path.is_file():
        raise UsageError(f"--measure {path}: there is no such file; name {SCRIPT_REQUIREMENTS}")
    with _script_environment(path):
        try:
            variables = runpy.run_path(str(path))
        except SystemExit as end:
            raise UsageError(
                f"--measure {path}: it ended with exit code {end.code or 0}; name"
                f" {SCRIPT_REQUIREMENTS}"
            ) from None
    lacking = [name for name in ("model", "batch") if name not in variables]
    if lacking:
        raise UsageError(
            f"--measure {path}: it defines no {' and no '.join(lacking)}; name"
            f" {SCRIPT_REQUIREMENTS}"
        )
    model, batch = variables["model"], variables["batch"]
    if (why := explain_invalid_model(model)) is not None:
        raise UsageError(f"--measure {path} defines no model: {why}")
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        kind = type(batch).__name__
        raise UsageError(
            f"--measure {path}: `batch` is a {kind}, not a pair; name {SCRIPT_REQUIREMENTS}"
        )
    features, labels, *weights = map(_as_arrays, batch)
    for what, columns in (("features", features), ("labels", labels)):
        if any(np.ndim(one) == 0 for one in arrays_of(columns)):
            raise UsageError(
                f"--measure {path}: the {what} of `batch` are not rows; name {SCRIPT_REQUIREMENTS}"
            )
    return measure_model(model, Batch(features, labels, *weights), density)


@contextmanager
def _script_environment(path: Path) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as ``python script.py`` does, without arguments."""
    folder, before = str(path.resolve().parent), sys.argv
    sys.path.insert(0, folder)
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = before
        if folder in sys.path:  # the script may have changed it; what it added stays for its model
            sys.path.remove(folder)


def _as_arrays(columns: Any) -> Any:
    """Convert torch tensors and lists to NumPy arrays, also in a tuple or dict, and None to ()."""
    if columns is None:
        return ()  # no labels: the model has its own loss
    return map_columns(
        lambda one: one.detach().cpu().numpy() if hasattr(one, "detach") else np.asarray(one),
        columns,
    )


def measure_model(model: FlatModel, batch: Batch, density: float) -> StepMeasurement:
    """Take some training steps, encode an update after each, and return the median times.

    ``density``: parameters that an update changes / all parameters. Raise UsageError if the batch
    does not suit the model.
    """
    if batch.rows == 0:
        raise UsageError("`batch` has no rows: give as many as a minibatch of the fit has")
    model.check(batch.features, batch.labels)
    initial = model.initial()
    k = first_exponent(initial)
    theta = round_to_grid(initial, k)
    local = theta.copy()
    model.bind(local)
    encoder = Encoder(theta.size, k, AutoThreshold(density, density))
    steps: list[float] = []
    publications: list[float] = []
    until_s = time.monotonic() + BUDGET_S
    while len(steps) < STEPS_MIN or (len(steps) < STEPS_MAX and time.monotonic() < until_s):
        steps.append(_time_call(lambda: model.step(batch)))
        publications.append(_time_call(lambda: encoder.publish(local, theta)))
    return StepMeasurement(
        theta.size, median(steps[WARM_STEPS:]), median(publications[WARM_STEPS:])
    )


def _time_call(work: Callable[[], Any]) -> float:
    """Call a function and return how long it took, in seconds."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
