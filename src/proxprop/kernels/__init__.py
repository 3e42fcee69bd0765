"""Triton kernels for NVIDIA GPUs. The tests compare each with its twin in plain torch."""
