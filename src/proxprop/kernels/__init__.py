"""Triton kernels for NVIDIA GPUs. Each has a twin in plain torch that the tests compare it with."""
