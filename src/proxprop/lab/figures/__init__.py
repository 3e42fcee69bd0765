"""Figures: pure functions of records that return a matplotlib figure; nothing here trains or opens a window."""

from proxprop.lab.figures.angle import angle
from proxprop.lab.figures.curves import curves
from proxprop.lab.figures.robustness import robustness
from proxprop.lab.figures.save import save
from proxprop.lab.figures.spectrum import spectrum

__all__ = ["angle", "curves", "robustness", "save", "spectrum"]
