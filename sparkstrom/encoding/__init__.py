"""From residual to message: the exact grid, thresholds, kernels, and the choice of form."""
