"""Compress a worker's parameter changes into updates, with kernels for CPU and GPU.

Importing it makes Numba use a private cache directory if the default one is unwritable or unsafe.
"""

import os

from sparkstrom.base.cache_directory import use_writable_cache

use_writable_cache(os.environ)
