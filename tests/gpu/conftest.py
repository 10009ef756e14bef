"""The device: a GPU where there is one, Numba's simulator in a process started for it.

``NUMBA_ENABLE_CUDASIM=1 pytest tests/gpu`` simulates; ``laws/test_encoding_cuda.py`` does that in
every run of the suite.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from sparkstrom.encoding.cuda import bitmaps, blocks, device, levels, memory, scan
from sparkstrom.encoding.cuda import parameter_kernels as steps
from sparkstrom.encoding.cuda.device import SIMULATED

# Looking for the smallest example that fails takes the simulator minutes.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate] if SIMULATED else list(Phase)
settings.register_profile(
    "gpu", deadline=None, max_examples=10 if SIMULATED else 100, phases=PHASES
)


# The simulator's threads look through the globals of a kernel's module at every call. Python adds
# a key to them at the first warning that comes from there; it has to be there before.
KERNEL_MODULES = (
    bitmaps,
    blocks,
    device,
    levels,
    memory,
    scan,
    steps,
)

allocating = threading.Lock()


def shared_array(self: Any, shape: Any, dtype: Any) -> Any:
    """``cuda.shared.array`` of a simulated block: one array for all threads, known by its line.

    The simulator's own has no lock: now and then two threads of a block get arrays of their own.
    """
    caller = sys._getframe(1)
    with allocating:
        place = (caller.f_code.co_filename, caller.f_lineno)
        return self._allocations.setdefault(place, np.empty(shape, dtype))


def run_block(self: Any, grid_point: Any, *arguments: Any) -> None:
    """``BlockManager.run`` of the simulator, which lets the block's threads run while it waits.

    The simulator's own polls without a pause, which takes half of the time.
    """
    from numba.cuda.simulator.kernel import BlockThread

    def target() -> None:
        self._f(*arguments)

    threads = [
        BlockThread(target, self, grid_point, point, self._debug)
        for point in np.ndindex(*self._block_dim)
    ]
    for thread in threads:
        thread.start()
    alive = threads
    while alive:
        failed = next((thread for thread in alive if thread.exception), None)
        if failed is None and not all(thread.syncthreads_blocked for thread in alive):
            time.sleep(0)
        else:
            release(alive, abort=failed is not None)
        if failed is not None:
            raise failed.exception[0].with_traceback(failed.exception[1])
        alive = [thread for thread in alive if thread.is_alive()]
    for thread in threads:
        if thread.exception:
            raise thread.exception[0].with_traceback(thread.exception[1])


def release(threads: list[Any], *, abort: bool) -> None:
    """End the wait of threads for the others of their block; ``abort`` ends the threads, too."""
    for thread in threads:
        thread.abort = abort
        thread.syncthreads_blocked = False
        thread.syncthreads_event.set()


def pytest_configure() -> None:
    if SIMULATED:  # this process runs nothing else
        settings.load_profile("gpu")
        from numba.cuda.simulator import kernel, kernelapi

        kernelapi.FakeCUDAShared.array = shared_array
        kernel.BlockManager.run = run_block
        for module in KERNEL_MODULES:
            vars(module).setdefault("__warningregistry__", {})


@pytest.fixture(autouse=True, scope="session")
def in_turns() -> Iterator[None]:
    """Let simulated threads, which wait for each other, take turns quickly."""
    interval = sys.getswitchinterval()
    if SIMULATED:
        sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
