"""Triton kernels for a GPU, and the backend that launches them."""
