"""Proximal Backpropagation for PyTorch."""
