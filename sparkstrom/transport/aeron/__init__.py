"""Transport by Aeron, a C library that sends messages by UDP and through shared memory.

    ensure_driver(...) -> MediaDriverHandle -> AeronTransport(handle)

The C media driver runs in its own process. Its C client is called through cffi, and frames are
received by code that Numba compiled. Importing this package only chooses a safe cache directory for
that code: the media driver's process must start fast, without loading Numba.
"""

import os

from sparkstrom.base.cache_directory import use_writable_cache

use_writable_cache(os.environ)
