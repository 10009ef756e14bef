"""Encoding on a GPU compared with a copy on the device, which uses the memory's full bandwidth.

    python -m benchmarks.encode_cuda --params 100000000 --json

One object per density (hits per parameter). Times are milliseconds between two events on the
device, or by the wall clock where stated: medians of 15 runs, where two things are compared of 15
pairs in turns. Bandwidth counts the bytes that must be read and written: 8 per parameter for a copy
and for a local scan, 12 for a replica scan, which also writes the residual.

    copy_ms, copy_gb_s     copy one f32 array to another
    encode_ms, encode_gb_s, share_of_copy     encode in local training: compare with theta, find
                           NaN, and write the codes in index order; share_of_copy: the median of
                           the ratios of bandwidths
    replica_ms, replica_gb_s, replica_share_of_copy     the same after ``residual += delta``
    move_ms                move theta at the hits
    choose_ms, choose_gb_s, choose_share_of_copy     choose half of the hits, which are below 2 tau,
                           at random: 4 bytes per parameter
    levels_ms, move_levels_ms     find the level of each hit; move theta and the residual by levels
    shift_ms               turn the codes of a layer's hits into codes of the whole model
    sample_ms              copy 65,536 residuals to the host, to choose tau; wall clock
    message_ms             copy the codes to the host, and encode them as Rice-coded gaps; wall
                           clock. No other transfer grows with the number of parameters

The exit status is 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from sparkstrom.base.errors import SetupError
from sparkstrom.encoding import backends, gaps
from sparkstrom.encoding.grid import quantum
from sparkstrom.encoding.layers import SAMPLE_PARAMS, Residuals

PAIRS = 15
DENSITIES = (1e-4, 1e-3, 1e-2)
Q = quantum(20)
TAU = 1000 * Q


def main() -> int:
    """Print one line per density; return 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=100_000_000, help="parameters of the model")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    try:
        kernels = backends.kernels("cuda")
    except SetupError as error:
        print(f"nothing measured: {error}", file=sys.stderr)
        return 2
    from sparkstrom.encoding.cuda.device import SIMULATED

    if SIMULATED:
        print("nothing measured: the simulator's times are not those of a GPU", file=sys.stderr)
        return 2
    for result in results(kernels, args.params):
        print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    return "  ".join(f"{name} {value:.4g}" for name, value in result.items() if name != "device")


def results(kernels: backends.Kernels, n_params: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each density, measured with the same arrays."""
    from numba import cuda

    random = np.random.default_rng(0)
    theta = (random.integers(-(2**20), 2**20, n_params) * Q).astype(np.float32)
    theta_there = cuda.to_device(theta)
    copied = cuda.device_array_like(theta_there)
    codes = cuda.device_array(n_params // 2 + 1, np.int32)
    for density in DENSITIES:
        hits = random.random(n_params, np.float32) < density
        residual = np.where(hits, 1.5 * TAU, 0).astype(np.float32)
        local = cuda.to_device(theta + residual)
        kept, nothing = cuda.to_device(residual), cuda.to_device(np.zeros_like(residual))
        copy, encode = time_in_turns(
            lambda: copied.copy_to_device(theta_there),
            lambda local=local: kernels.scan_local(local, theta_there, TAU, codes),
        )
        copy_too, replica = time_in_turns(
            lambda: copied.copy_to_device(theta_there),
            lambda kept=kept, nothing=nothing: kernels.scan_replica(kept, nothing, TAU, codes),
        )
        count = int(hits.sum())
        move = median(
            on_device(
                lambda c=count, kept=kept: kernels.move(theta_there, kept, codes[:c], TAU, 0.0, Q)
            )
            for _ in range(PAIRS)
        )
        by_level = time_levels(kernels, theta_there, kept, codes[:count], copied)
        theta_there.copy_to_device(theta)
        yield {
            "device": device_name(),
            "n_params": n_params,
            "density": density,
            "copy_ms": median(copy),
            "copy_gb_s": 8e-6 * n_params / median(copy),
            "encode_ms": median(encode),
            "encode_gb_s": 8e-6 * n_params / median(encode),
            "share_of_copy": median(c / e for c, e in zip(copy, encode, strict=True)),
            "replica_ms": median(replica),
            "replica_gb_s": 12e-6 * n_params / median(replica),
            "replica_share_of_copy": median(
                1.5 * c / r for c, r in zip(copy_too, replica, strict=True)
            ),
            "move_ms": move,
            **by_level,
            "message_ms": time_message(codes, count, n_params),
        }


def device_name() -> str:
    """Return the GPU's name, which old versions of Numba have as bytes."""
    from numba import cuda

    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else str(name)


def time_levels(
    kernels: backends.Kernels, theta: Any, kept: Any, codes: Any, copied: Any
) -> dict[str, float]:
    """Time the kernels that only publications with levels, random choice or layers need.

    theta   f32[n_params]
    kept    f32[n_params]  the residual, 1.5 tau at the hits
    codes   i32[hits]
    copied  f32[n_params]  the target of copies
    """
    from numba import cuda

    n_params, count = kept.size, codes.size
    levels, chosen = cuda.device_array(count, np.uint8), cuda.device_array(count, np.int32)
    copy, choose = time_in_turns(
        lambda: copied.copy_to_device(theta),
        lambda: kernels.choose_replica(kept, TAU, 2**31, 1, chosen),
    )
    residuals = Residuals(theta, kept, 1, None, backends.backend(backends.CUDA))
    sampled = []
    for seed in range(PAIRS):
        begin = time.perf_counter()
        residuals.sample_sizes(SAMPLE_PARAMS, seed)
        sampled.append(1e3 * (time.perf_counter() - begin))

    def time_median(work: Callable[[], Any]) -> float:
        return median(on_device(work) for _ in range(PAIRS))

    return {
        "choose_ms": median(choose),
        "choose_gb_s": 4e-6 * n_params / median(choose),
        "choose_share_of_copy": median(0.5 * c / e for c, e in zip(copy, choose, strict=True)),
        "levels_ms": time_median(lambda: kernels.find_levels_replica(kept, codes, TAU, 3, levels)),
        "move_levels_ms": time_median(
            lambda: kernels.move_by_levels(theta, kept, codes, levels, TAU, -TAU, Q)
        ),
        "shift_ms": time_median(lambda: kernels.shift_codes(chosen, 1)),
        "sample_ms": median(sampled),
    }


def time_in_turns(
    one: Callable[[], Any], other: Callable[[], Any]
) -> tuple[list[float], list[float]]:
    """Time both in turns, after one run of each that does not count; return milliseconds."""
    pairs = [(on_device(one), on_device(other)) for _ in range(PAIRS + 1)][1:]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def on_device(work: Callable[[], Any]) -> float:
    """Run ``work``; return the milliseconds that it takes on the device."""
    from numba import cuda

    begin, end = cuda.event(), cuda.event()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(cuda.event_elapsed_time(begin, end))


def time_message(codes: Any, count: int, n_params: int) -> float:
    """Return the wall-clock milliseconds from codes on the device to a payload on the host."""
    out = np.empty(gaps.bytes_max(count, n_params) + gaps.FLUSH_BYTES, np.uint8)
    times = []
    for _ in range(PAIRS):
        begin = time.perf_counter()
        gaps.encode(codes[:count].copy_to_host(), n_params, out)
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


if __name__ == "__main__":
    sys.exit(main())
