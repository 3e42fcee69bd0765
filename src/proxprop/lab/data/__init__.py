"""Datasets: readers that check what they read, a search for folders, a download where there is internet.

Convention: images are float32 [samples, channels, height, width] in [0, 1]; labels int64 [samples] from 0.
"""

from proxprop.lab.data.load import Dataset, Split, fingerprint, load

__all__ = ["Dataset", "Split", "fingerprint", "load"]
