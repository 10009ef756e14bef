"""Tests of reading a device vector from another thread, and of choosing a device."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numba import cuda

from sparkstrom.base.errors import SetupError
from sparkstrom.encoding import backends
from sparkstrom.encoding.cuda.device import Scratch, is_usable

if not is_usable():  # the simulator counts as usable
    pytest.skip("no GPU; run simulated by laws/test_encoding_cuda.py", allow_module_level=True)

N = 1000


def test_reader_returns_current_values_in_other_thread() -> None:
    memory, values = backends.on_device(0).memory, np.arange(N, dtype=np.float32)
    array = memory.zeros(N, np.float32)
    read, parts = memory.reader(array), []

    def look() -> None:
        parts.extend((read(0, 10), read(990, N), read(N, N)))

    memory.assign(array, values)
    other = threading.Thread(target=look)
    other.start()
    other.join()
    memory.assign(array, np.zeros(N, np.float32))
    assert [part.tolist() for part in parts] == [list(range(10)), list(range(990, N)), []]


@pytest.mark.parametrize("index", [-1, 1000])
def test_missing_device_error_names_device_count(index: int) -> None:
    with pytest.raises(SetupError, match=f"device {index} is wanted, Numba sees {len(cuda.gpus)}"):
        backends.on_device(index)


def test_scratch_memory_is_reused_only_on_same_device() -> None:
    scratch = Scratch()
    scratch.move_to(0)
    first = scratch.zeros("answer", 2)
    scratch.move_to(0)
    assert scratch.zeros("answer", 2) is first
    scratch.move_to(1)
    assert scratch.zeros("answer", 2) is not first
