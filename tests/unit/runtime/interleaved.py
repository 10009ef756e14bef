"""Interleavings of two threads, enumerated: one works, the other acts at any point.

Nothing runs at the same time. While one side's method runs, a trace function is called before each
of its instructions and does there what the other side would do, unless the other side would have to
wait for a lock. So every place where it could come in is tried, in each run, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_every_instruction(files: tuple[str, ...], act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before each instruction of files whose path ends so."""

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
