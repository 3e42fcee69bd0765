"""Scale a running average and add what a step has summed, in one pass.

Torch's operations would take five, because a sum that is not finite has to be set to zero before it is added.
"""

import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.kernels.launch import launches, on_its_device


@triton.jit(do_not_specialize=["index"])
def _take_in(AVERAGE, SUMMED, LEFT_OUT, index, count, decay, NUMBERS: tl.constexpr):
    if tl.load(LEFT_OUT + index) == 0:
        at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
        inside = at < count
        average = tl.load(AVERAGE + at, mask=inside)
        tl.store(AVERAGE + at, average * decay + tl.load(SUMMED + at, mask=inside), mask=inside)


@on_its_device
def take_in(average: Tensor, summed: Tensor, left_out: Tensor, index: int, decay: float) -> None:
    """`average ← decay·average + summed` in place; nothing where `left_out[index]` is true.

    Args:
        average: float32, without gaps.
        summed: likewise.
        left_out: truth values on the same device.
        index: the one that counts.
        decay: how much of the average is kept.
    """
    count = average.numel()
    launch = launches("averaging", [average, summed, left_out])
    grid = (triton.cdiv(count, tuning.AVERAGED_NUMBERS),)
    launch(
        _take_in, grid, average, summed, left_out, index, count, float(decay), NUMBERS=tuning.AVERAGED_NUMBERS
    )
