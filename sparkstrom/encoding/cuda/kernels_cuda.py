"""The kernels on a GPU: same names and argument tables as in ``reference``, for device arrays.

Every array of a call lies on the device and is taken in place; what crosses to the host is the
answer alone: counts, and with ``cuda_memory.to_host`` the message.
"""

from __future__ import annotations

from sparkstrom.encoding.cuda.cuda_bitmaps import (
    bitmap_add,
    bitmap_add_both,
    bitmap_local,
    bitmap_replica,
)
from sparkstrom.encoding.cuda.cuda_levels import (
    choose_local,
    choose_replica,
    levels_local,
    levels_replica,
    move_levels,
    sample,
    shift_codes,
)
from sparkstrom.encoding.cuda.cuda_scan import bitmap_count, bitmap_decode, scan_local, scan_replica
from sparkstrom.encoding.cuda.cuda_steps import (
    add_quanta,
    add_quanta_both,
    apply_hits,
    apply_hits_both,
    clip_local,
    clip_replica,
    move,
    norms_local,
    norms_replica,
    sum_hits,
)

__all__ = [
    "add_quanta",
    "add_quanta_both",
    "apply_hits",
    "apply_hits_both",
    "bitmap_add",
    "bitmap_add_both",
    "bitmap_count",
    "bitmap_decode",
    "bitmap_local",
    "bitmap_replica",
    "choose_local",
    "choose_replica",
    "clip_local",
    "clip_replica",
    "levels_local",
    "levels_replica",
    "move",
    "move_levels",
    "norms_local",
    "norms_replica",
    "sample",
    "scan_local",
    "scan_replica",
    "shift_codes",
    "sum_hits",
]
