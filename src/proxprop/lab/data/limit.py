"""How much a compressed file may grow."""

UNPACKED = 1 << 31
"""The most bytes that a compressed file may unpack to: 2 GiB, ten times the largest dataset this lab downloads."""
