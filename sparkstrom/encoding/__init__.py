"""From residual to message: the exact grid, thresholds, kernels, and the choice of form."""

import os

from sparkstrom.base.kernel_cache import use_writable_cache

use_writable_cache(os.environ)
