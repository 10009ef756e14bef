"""Aeron by cffi: the C media driver in a process of its own, the C client, Numba in the data path.

    ensure_driver(...) -> DriverHandle -> AeronTransport(handle)

Nothing heavy is imported here: ``driver`` must load in a process that never sees Numba.
"""

import os

from sparkstrom.base.kernel_cache import use_writable_cache

use_writable_cache(os.environ)
