"""Kernels compiled with Numba for arrays in host memory, and that memory."""
