"""Import all CUDA kernels into one namespace, with the same names as in ``encoding.cpu.kernels``.

``encoding.reference_kernels`` documents the arguments. All array arguments are on the device and
used in place. Only the returned counts are copied to the host; a message is copied by
``memory.to_host``.
"""

from __future__ import annotations

from sparkstrom.encoding.cuda.bitmaps import (
    bitmap_add,
    bitmap_add_both,
    bitmap_local,
    bitmap_replica,
)
from sparkstrom.encoding.cuda.levels import (
    choose_local,
    choose_replica,
    find_levels_local,
    find_levels_replica,
    move_by_levels,
    sample,
    shift_codes,
)
from sparkstrom.encoding.cuda.parameter_kernels import (
    add_quanta,
    add_quanta_both,
    apply_hits,
    apply_hits_both,
    clip_local,
    clip_replica,
    move,
    residual_sums_local,
    residual_sums_replica,
    sum_hits,
)
from sparkstrom.encoding.cuda.scan import bitmap_count, bitmap_decode, scan_local, scan_replica

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
    "find_levels_local",
    "find_levels_replica",
    "move",
    "move_by_levels",
    "residual_sums_local",
    "residual_sums_replica",
    "sample",
    "scan_local",
    "scan_replica",
    "shift_codes",
    "sum_hits",
]
