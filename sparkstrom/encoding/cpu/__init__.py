"""Implement the CPU backend: kernels compiled with Numba, and their host memory."""
