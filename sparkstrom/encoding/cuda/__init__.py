"""Kernels for a GPU, and its memory."""
