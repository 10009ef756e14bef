"""Kernels in Numba for the host, and its memory."""
