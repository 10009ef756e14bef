"""Aeron through cffi: the C media driver in its own process, the C client, Numba in the data path.

    ensure_driver(...) -> DriverHandle -> AeronTransport(handle)

Importing this package is cheap: the driver's process must start without loading Numba.
"""

import os

from sparkstrom.base.kernel_cache import use_writable_cache

use_writable_cache(os.environ)
