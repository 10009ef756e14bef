"""Test that ``benchmarks.encode_cuda`` measures everything that its documentation lists.

The simulator has neither events nor a device name; there, a clock replaces the events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import encode_cuda
from sparkstrom.encoding import backends
from sparkstrom.encoding.cuda.device import SIMULATED, is_usable

if not is_usable():  # the simulator counts as usable
    pytest.skip("no GPU; run simulated by laws/test_encoding_cuda.py", allow_module_level=True)


def measure_by_clock(work: Callable[[], Any]) -> float:
    """Return the time that ``work`` takes in milliseconds, never 0."""
    begin = time.perf_counter_ns()
    work()
    return 1e-6 * (time.perf_counter_ns() - begin + 1)


def test_benchmark_measures_every_documented_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    if SIMULATED:
        monkeypatch.setattr(encode_cuda, "on_device", measure_by_clock)
        monkeypatch.setattr(encode_cuda, "device_name", lambda: "simulated")
    monkeypatch.setattr(encode_cuda, "PAIRS", 1)
    monkeypatch.setattr(encode_cuda, "SAMPLE_PARAMS", 64)
    monkeypatch.setattr(encode_cuda, "DENSITIES", (0.1,))
    (result,) = encode_cuda.results(backends.kernels(backends.CUDA), 1000)
    documented = {
        name.strip(",")
        for name in str(encode_cuda.__doc__).split()
        if name.strip(",").endswith(("_ms", "_gb_s", "_copy"))
    }
    assert set(result) == documented | {"device", "n_params", "density"}
    assert all(result[name] > 0 for name in documented)
