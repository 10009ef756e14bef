"""The device: a GPU where there is one, Numba's simulator in a process started for it.

``NUMBA_ENABLE_CUDASIM=1 pytest tests/gpu`` simulates; ``laws/test_encoding_cuda.py`` does that in
every run of the suite.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from numba.cuda.simulator.kernel import BlockManager, BlockThread, Dim3

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


class SimulatedThread(BlockThread):  # type: ignore[misc]
    """A thread of simulated blocks, one after the other; of a block's, one runs at a time."""

    def __init__(self) -> None:
        threading.Thread.__init__(self, daemon=True)
        self._turn, self._pause = threading.Lock(), threading.Lock()
        self._turn.acquire(), self._pause.acquire()
        self.start()

    def begin(self, block: Any, place: Any, index: tuple[int, ...], arguments: Any) -> None:
        """Prepare for the first turn in a block."""
        self._manager, self._arguments = block, arguments
        self.blockIdx, self.threadIdx = Dim3(*place), Dim3(*index)
        sizes = Dim3(*block._block_dim)
        self.thread_id = index[0] + sizes.x * (index[1] + sizes.y * index[2])
        self.is_finished, self.abort = False, False
        self.error: BaseException | None = None

    def run(self) -> None:
        while True:
            self._turn.acquire()
            try:
                self._manager._f(*self._arguments)
            except BaseException as error:
                self.error = error
            self.is_finished = True
            self._pause.release()

    def take_turn(self) -> None:
        """Run until the next barrier, or to the end."""
        self._turn.release()
        self._pause.acquire()

    def syncthreads(self) -> None:
        self._pause.release()
        self._turn.acquire()
        if self.abort:
            raise RuntimeError("another thread of the block has failed")


idle_threads: list[SimulatedThread] = []
orders = random.Random(0)


def run_block(self: Any, grid_point: Any, *arguments: Any) -> None:
    """``BlockManager.run`` of the simulator, with threads that take turns.

    The simulator's own starts new threads for each block and polls them, which takes most of the
    time. Between two barriers the threads run in a random order, so a barrier that is missing
    shows. Threads of the host may run kernels at once.
    """
    points = [*np.ndindex(*self._block_dim)]
    threads = [idle_threads.pop() if idle_threads else SimulatedThread() for _ in points]
    for thread, point in zip(threads, points, strict=True):
        thread.begin(self, grid_point, point, arguments)
    alive, error = threads, None
    while alive:
        for thread in orders.sample(alive, len(alive)):
            thread.abort = error is not None
            thread.take_turn()
            error = error or thread.error
        alive = [thread for thread in alive if not thread.is_finished]
    idle_threads.extend(threads)
    if error is not None:
        raise error


def pytest_configure() -> None:
    if SIMULATED:  # this process runs nothing else
        settings.load_profile("gpu")
        BlockManager.run = run_block
        for module in KERNEL_MODULES:
            vars(module).setdefault("__warningregistry__", {})
