"""Deferred mode: backward passes sum S beside the gradient, and one solve turns both into the direction.

`D = (λI + S)⁻¹B` depends on the batch through `S = AᵀA` and `B = AᵀG` alone, and both are sums over samples. So one
step does not depend on how a batch was cut into micro-batches.
"""

from proxprop.deferred.attaching import attach
from proxprop.deferred.average import Running
from proxprop.deferred.handle import Attached

__all__ = ["Attached", "Running", "attach"]
