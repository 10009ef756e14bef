"""Compress a worker's parameter changes into updates, with kernels for CPU and GPU.

Importing this package makes Numba use a private cache directory unless the default one is writable
and no other user can write to it.
"""

import os

from sparkstrom.base.cache_directory import use_writable_cache

use_writable_cache(os.environ)
