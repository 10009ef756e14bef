"""Encoding and decoding on one core, compared with the least time that memory allows (the floor).

    python -m benchmarks.encode --params 25000000 --json

One object per density (hits per parameter). Times are milliseconds of processor time of the one
thread that works, so that other programs on the machine matter little. The floor is
``r[i] += g[i]``, compiled by Numba, over the same arrays. Every ``x_`` figure is a median of 15
ratios of two times, which are measured in turns. Before each run the arrays get their initial
values, which is not timed; they are larger than the caches.

    floor_ms, numpy_ms     the floor; a simple NumPy encoder (add, compare, extract, subtract)
    encode_ms, x_floor     replica training: add, count, extract, subtract from the residual
    with_theta_x_floor     the same, and move theta: all the work on arrays
    local_encode_ms, local_x_floor    local training: compare with theta, count, extract, move theta
    publish_ms, publish_x_floor       all of ``Encoder.publish`` in local training: the same, and
                           encode the message
    decode_ms, add_at_ms   add decoded hits to theta, and check the range; ``numpy.add.at`` with the
                           same hits (i64 indices, f32 values made in advance); theta not in cache
    decode_x_add_at, decode_x_add_at_warm   how many times faster decoding is than ``numpy.add.at``;
                           the same with theta in the cache
    bytes, entropy_bytes, x_entropy   size of the ``gaps`` payload; entropy of the positions, and a
                           sign per hit; the ratio of the two
    gaps_encode_mhits_s, gaps_decode_mhits_s   encode hits as a payload; decode it to checked hits:
                           millions per second
    levels_encode_x_gaps, levels_decode_x_gaps   the same hits with levels (a tenth of them above 0,
                           a hundredth of these above 1), compared with ``gaps`` alone
    levels_x_entropy       size of the ``levels`` payload, compared with the entropy of positions,
                           signs and levels
    auto_x_publish         ``Encoder.publish`` in local training with ``AutoThreshold`` of the same
                           density, which adds a sample and levels, compared with a fixed threshold
    bitmap_encode_x_floor, bitmap_decode_x_floor   with hits at half of the parameters: encode the
                           residual as a bitmap and move it and theta; check a bitmap and add it to
                           theta. ``bitmap_local_encode_x_floor``: encode in local training. These
                           do not depend on the density, and are measured once per run

Compare ratios, not times: the speed of memory varies from day to day and between machines.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.codec.payload import read_bitmap_untrusted
from sparkstrom.encoding import backends, gaps
from sparkstrom.encoding import leveled_gaps as levels
from sparkstrom.encoding.cpu.kernel_loader import kernel
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.grid import quantum
from sparkstrom.encoding.thresholds import AutoThreshold, FixedThreshold

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Work = Callable[[], Any]

K = 20
Q = quantum(K)
TAU_QUANTA = 1000
TAU = TAU_QUANTA * Q
PAIRS = 15


def main() -> int:
    """Print one line per density."""
    parser = argparse.ArgumentParser(description="Time of encoding and decoding on one core.")
    parser.add_argument("--params", type=int, default=25_000_000, help="parameters of the model")
    parser.add_argument(
        "--densities", default="1e-4,1e-3,1e-2", help="hits per parameter, by comma"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    bitmap = measure_bitmap(args.params)
    for density in map(float, args.densities.split(",")):
        exact = measure_density(args.params, density) | bitmap
        figures = {name: round(value, 6) for name, value in exact.items()}
        print(json.dumps(figures) if args.json else format_figures(figures), flush=True)
    return 0


def format_figures(figures: dict[str, float]) -> str:
    """Return a table with a line for each figure."""
    return "\n".join(f"{name:30} {value:.10g}" for name, value in figures.items()) + "\n"


@kernel("void(f4[::1], f4[::1])")
def floor(r: F32, g: F32) -> None:
    """Add a gradient to the residual, which every encoder has to do."""
    for i in range(r.shape[0]):
        r[i] += g[i]


@dataclass
class Arrays:
    """A worker's arrays, with copies of their values before encoding."""

    residual: F32
    delta: F32
    theta: F32
    local: F32
    hits: I32  # where ``residual + delta`` reaches tau

    def __post_init__(self) -> None:
        self.before = [self.residual.copy(), self.theta.copy(), self.local.copy()]
        self.codes = np.empty(self.residual.size // 2 + 1, np.int32)
        self.scratch = np.empty(backends.SCRATCH_BYTES, np.uint8)
        self.packed = np.empty((self.residual.size + 3) // 4, np.uint8)

    def reset(self) -> None:
        """Restore the arrays as they were at the start."""
        for array, was in zip((self.residual, self.theta, self.local), self.before, strict=True):
            np.copyto(array, was)

    def floor(self) -> None:
        """Do the least that any encoder must: add the step to the residual."""
        floor(self.residual, self.delta)


def make_arrays(n_params: int, density: float) -> Arrays:
    """Return arrays whose residuals are below tau, except at random hits of both signs."""
    random = np.random.default_rng(7)
    residual, delta = (random.random(n_params, np.float32) for _ in range(2))
    for noise, width in ((residual, 0.8 * TAU), (delta, 0.1 * TAU)):
        noise -= np.float32(0.5)
        noise *= np.float32(width)
    hits = np.flatnonzero(random.random(n_params, np.float32) < density).astype(np.int32)
    signs = random.choice(np.array([-1, 1], np.float32), hits.size)
    residual[hits], delta[hits] = signs * np.float32(0.9 * TAU), signs * np.float32(0.3 * TAU)
    quanta = random.integers(-(2**20), 2**20, n_params, np.int32)
    theta = quanta.astype(np.float32) * np.float32(Q)
    return Arrays(residual, delta, theta, theta + (residual + delta), hits)


def time_work(work: Work) -> float:
    """Run ``work``; return the processor time of this thread."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def compare(ours: Work, theirs: Work, prepare: Work, pairs: int = PAIRS) -> dict[str, float]:
    """Run both in turns, in pairs; return the medians of milliseconds and of ours / theirs."""
    measured: list[tuple[float, float]] = []
    for pair in range(pairs):
        took = {}
        for work in (ours, theirs) if pair % 2 else (theirs, ours):
            prepare()
            took[work] = time_work(work)
        measured.append((took[ours], took[theirs]))
    return {
        "ours": 1e3 * median(one for one, _ in measured),
        "theirs": 1e3 * median(other for _, other in measured),
        "ratio": median(one / other for one, other in measured),
    }


def measure_density(n_params: int, density: float) -> dict[str, float]:
    """Return all figures of one density."""
    memory = make_arrays(n_params, density)
    figures: dict[str, float] = {"density": density, "params": n_params, "hits": memory.hits.size}
    for part in (measure_encoding(memory), measure_decoding(memory), measure_payload(memory)):
        figures |= dict(part)
    return figures


def measure_encoding(memory: Arrays) -> Iterator[tuple[str, float]]:
    """Yield the figures of encoding in replica and local training, compared with the floor."""
    kernels, codes = backends.kernels(), memory.codes
    encoder = Encoder(memory.theta.size, K, FixedThreshold(TAU))

    def replica(with_theta: bool) -> None:
        count, _ = kernels.scan_replica(memory.residual, memory.delta, TAU, codes)
        theta, residual = memory.theta, memory.residual
        if with_theta:
            kernels.move(theta, residual, codes[:count], TAU, -TAU, Q)
        else:
            kernels.move(residual, theta, codes[:count], -TAU, 0.0, Q)

    def local() -> None:
        count, _ = kernels.scan_local(memory.local, memory.theta, TAU, codes)
        kernels.move(memory.theta, memory.local, codes[:count], TAU, 0.0, Q)

    def numpy_encoder() -> None:
        memory.residual += memory.delta
        hits = np.flatnonzero(np.abs(memory.residual) >= np.float32(TAU))
        memory.residual[hits] -= np.sign(memory.residual[hits]) * np.float32(TAU)

    found = compare(lambda: replica(False), memory.floor, memory.reset)
    yield "floor_ms", found["theirs"]
    yield "encode_ms", found["ours"]
    yield "x_floor", found["ratio"]
    yield "with_theta_x_floor", compare(lambda: replica(True), memory.floor, memory.reset)["ratio"]
    found = compare(local, memory.floor, memory.reset)
    yield "local_encode_ms", found["ours"]
    yield "local_x_floor", found["ratio"]
    found = compare(lambda: encoder.publish(memory.local, memory.theta), memory.floor, memory.reset)
    yield "publish_ms", found["ours"]
    yield "publish_x_floor", found["ratio"]
    density = memory.hits.size / memory.theta.size
    auto = Encoder(memory.theta.size, K, AutoThreshold(density, density))

    def publish() -> None:
        encoder.publish(memory.local, memory.theta)

    def publish_auto() -> None:
        auto.publish(memory.local, memory.theta)

    yield "auto_x_publish", compare(publish_auto, publish, memory.reset)["ratio"]
    yield "numpy_ms", compare(numpy_encoder, memory.floor, memory.reset, pairs=3)["ours"]


def measure_decoding(memory: Arrays) -> Iterator[tuple[str, float]]:
    """Yield the figures of adding hits to theta, compared with ``numpy.add.at``."""
    kernels, hits = backends.kernels(), memory.hits
    quanta = np.where(memory.residual[hits] > 0, TAU_QUANTA, -TAU_QUANTA).astype(np.int32)
    wide, values = hits.astype(np.int64), quanta.astype(np.float32) * np.float32(Q)

    def ours() -> None:
        kernels.apply_hits(memory.theta, hits, quanta, Q)

    def add_at() -> None:
        np.add.at(memory.theta, wide, values)

    memory.reset()
    found = compare(ours, add_at, memory.floor)  # the floor's arrays push theta out of the cache
    yield "decode_ms", found["ours"]
    yield "add_at_ms", found["theirs"]
    yield "decode_x_add_at", 1 / found["ratio"]
    yield "decode_x_add_at_warm", 1 / compare(ours, add_at, add_at)["ratio"]


def measure_payload(memory: Arrays) -> Iterator[tuple[str, float]]:
    """Yield the size of a ``gaps`` payload, and how fast it is encoded and decoded."""
    n_params, hits = memory.theta.size, memory.hits
    codes = np.where(memory.before[0][hits] > 0, hits, ~hits).astype(np.int32)
    out = np.empty(gaps.bytes_max(hits.size, n_params) + gaps.FLUSH_BYTES, np.uint8)
    payload = out[: gaps.encode(codes, n_params, out)].copy()
    indices, amounts = np.empty(hits.size, np.int32), np.empty(hits.size, np.int32)

    def encode() -> None:
        gaps.encode(codes, n_params, out)

    def decode() -> None:
        gaps.read_gaps(payload, n_params, TAU_QUANTA, indices, amounts)

    density = hits.size / n_params
    bits = -density * np.log2(density) - (1 - density) * np.log2(1 - density) + density
    entropy_bytes = float(n_params * bits / 8)
    yield "bytes", payload.size
    yield "entropy_bytes", entropy_bytes
    yield "x_entropy", payload.size / entropy_bytes
    found = compare(encode, decode, lambda: None)
    yield "gaps_encode_mhits_s", hits.size / found["ours"] / 1e3
    yield "gaps_decode_mhits_s", hits.size / found["theirs"] / 1e3
    yield from measure_levels(codes, n_params, encode, decode)


def measure_levels(
    codes: I32, n_params: int, encode: Work, decode: Work
) -> Iterator[tuple[str, float]]:
    """Yield the figures of payloads with levels, compared with ``gaps`` alone."""
    drawn = np.random.default_rng(9).random(codes.size)
    of = (drawn < 0.1).astype(np.uint8) + (drawn < 0.001)
    of[0] = 1
    top = int(of.max())
    out = np.empty(levels.bytes_max(codes.size, n_params, top) + gaps.FLUSH_BYTES, np.uint8)
    payload = out[: levels.encode(codes, of, top, n_params, out)].copy()
    indices, amounts = np.empty(codes.size, np.int32), np.empty(codes.size, np.int32)

    def encode_levels() -> None:
        levels.encode(codes, of, top, n_params, out)

    def decode_levels() -> None:
        levels.read(payload, n_params, TAU_QUANTA, indices, amounts)

    yield "levels_encode_x_gaps", compare(encode_levels, encode, lambda: None)["ratio"]
    yield "levels_decode_x_gaps", compare(decode_levels, decode, lambda: None)["ratio"]
    yield "levels_x_entropy", 8 * payload.size / entropy_bits(codes, of, n_params)


def entropy_bits(codes: np.ndarray, level_of_hit: np.ndarray, n_params: int) -> float:
    """Return the entropy, in bits, of randomly spread hits with their signs and levels."""
    p = codes.size / n_params
    bits = -n_params * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) + codes.size
    counts = np.bincount(level_of_hit)
    return bits + float(sum(c * math.log2(codes.size / c) for c in counts.tolist() if c))


def measure_bitmap(n_params: int) -> dict[str, float]:
    """Return the figures of the bitmap, with hits at half of the parameters."""
    kernels, memory = backends.kernels(), make_arrays(n_params, 0.5)
    memory.residual *= np.float32(2)  # residuals that are not hits are now up to 0.8 tau
    np.copyto(memory.local, memory.theta + memory.residual)
    memory.before = [memory.residual.copy(), memory.theta.copy(), memory.local.copy()]
    steps, rest = (TAU, TAU, 1, Q), (memory.scratch, memory.packed)
    theta, packed = memory.theta, memory.packed

    def replica() -> None:
        kernels.bitmap_replica(memory.residual, theta, *steps, *rest)

    def local() -> None:
        kernels.bitmap_local(memory.local, theta, *steps, *rest)

    count = sum(kernels.bitmap_local(memory.local, theta, *steps, *rest)[:2])
    payload = packed.tobytes()

    def decode() -> None:
        form = Form.BITMAP_UP
        bitmap = read_bitmap_untrusted(payload, form, count, TAU_QUANTA, n_params)
        kernels.bitmap_add(theta, bitmap.packed, bitmap.side, TAU, Q, memory.scratch)

    return {
        name: compare(work, memory.floor, memory.reset)["ratio"]
        for name, work in (
            ("bitmap_encode_x_floor", replica),
            ("bitmap_local_encode_x_floor", local),
            ("bitmap_decode_x_floor", decode),
        )
    }


if __name__ == "__main__":
    raise SystemExit(main())
