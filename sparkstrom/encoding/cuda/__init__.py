"""Implement the CUDA backend: kernels compiled with Numba, access to GPUs, and device memory."""
