"""Freed memory stays with the process while it trains, and is returned at the end.

The test runs in another process, because the setting holds for a whole process and other tests'
memory would be counted.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

WORK = """
import resource
import numpy as np
from sparkstrom.worker.training_task import retain_freed_memory

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        np.ones(5_000_000, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

with retain_freed_memory():
    faults(2)
    print(faults(10), end=" ")
    within = resident()
print(within - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs the GNU C library")
def test_freed_memory_is_reused_and_returned_at_end() -> None:
    """20 MB per step are 4,883 pages of 4 KiB or 10 of 2 MiB; each new page is a page fault."""
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    in_ten_steps, pages_back = map(int, done.stdout.split())
    assert in_ten_steps < 10
    assert pages_back > 4000
