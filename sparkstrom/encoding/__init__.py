"""Compress a worker's parameter changes into updates, with kernels for CPU and GPU."""

import os

from sparkstrom.base.kernel_cache import use_writable_cache

use_writable_cache(os.environ)
