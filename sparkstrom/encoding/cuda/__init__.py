"""Implement the CUDA backend: kernels compiled with Numba, and their device memory."""
