"""Enumerate the interleavings of two threads in one thread.

The threads do not run in parallel. While a method of the first thread runs, a trace function is
called before each of its instructions, and does there what the second thread would do, unless that
thread would have to wait for a lock. Every run tries all these points, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_every_instruction(files: tuple[str, ...], act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before each instruction of the files whose paths end with one of ``files``."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
