"""Implement the CPU backend: kernels compiled with Numba, their compiler, and host memory."""
