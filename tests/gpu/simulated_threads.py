"""Threads for Numba's CUDA simulator that take turns; the simulator's own threads poll."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
from numba.cuda.simulator.kernel import BlockManager, BlockThread, Dim3


class SimulatedThread(BlockThread):  # type: ignore[misc]
    """A reusable thread that plays one CUDA thread of one block after another."""

    def __init__(self) -> None:
        threading.Thread.__init__(self, daemon=True)
        self._turn, self._pause = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._pause.acquire()
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

    def end(self) -> None:
        """Drop the block, its arrays and its error."""
        self._manager = self._arguments = self.error = None

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
    """Run a block as the simulator's ``BlockManager.run`` does, with threads that take turns.

    The original starts new threads for each block and polls them, which takes most of the time.
    Between two barriers the threads run one after another in a random order, so a missing barrier
    is likely to show; a race of two threads between barriers is not.
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
    for thread in threads:
        thread.end()
    idle_threads.extend(threads)
    if error is not None:
        raise error


def replace_threads() -> None:
    """Make the simulator use these threads, in this process."""
    BlockManager.run = run_block
