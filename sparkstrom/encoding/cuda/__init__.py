"""Kernels compiled with Numba for CUDA devices, and device memory."""
