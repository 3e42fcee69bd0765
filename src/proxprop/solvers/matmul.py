"""`leftᵀ·right` of float32 matrices on a GPU's tensor cores, as accurate as a float32 product.

A float32 number is the sum of three bfloat16 numbers of eight bits each, exactly if above 1e-33. Of
the nine products of parts, six reach as far as float32's last bit; they stand above one another along the inner
dimension of one bfloat16 product with float32 sums, the smallest first: six times the work at fifteen times the rate.
Where they would take much memory, two products of three share what stands there twice.

Tensor cores cut off what they add to a sum rather than round it, so that long sums come out too small; long inner
dimensions are therefore summed in pieces. Where both factors came in bfloat16, their own rounding is far above that,
and there is one product as in BackProp.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from proxprop import device, tuning
from proxprop.solvers.memory import in_huge_pages, is_transformed

LEFT, RIGHT = (0, 2, 1, 0, 1, 0), (2, 0, 1, 1, 0, 0)
"""Which parts meet, counted from the largest."""

LEFT_IN_TWO, RIGHT_IN_TWO = (2, 1, 0, 0), (0, 1, 0, 1, 2)
"""The same in two products of three: the first blocks of left meet the last of right, then the last the first."""

WALK = (0, 2, 0, 1, 1, 0, 0)
"""Each of those pairs stands side by side in it once: where left is right, one stack of parts holds both factors."""

SMALLEST_FIRST = (2, 1, 0)


def transposed_product(left: Tensor, right: Tensor | None = None, precise: bool = False) -> Tensor:
    """`leftᵀ·right [m, n]` for left `[rows, m]` and right `[rows, n]` or left; in float32 where one is bfloat16.

    Args:
        left: first factor, freed before the product where the caller does not keep it and it is taken in parts.
        right: second factor, likewise.
        precise: whether TF32 is not enough, even where the caller allows it.
    """
    factors = [left] if right is None else [left, right]
    del left, right
    flops = 2.0 * factors[0].numel() * factors[-1].shape[1]
    return in_parts(lambda a, b, total: multiply(a.mT, b, total), factors, flops, precise)


@dataclass(frozen=True)
class PendingProduct:
    """A product on a GPU, all but multiplied: the sum of products of these pairs `[m, rows]` and `[rows, n]`."""

    pairs: list[tuple[Tensor, Tensor]]

    def multiply(self) -> Tensor:
        """The product `[m, n]`, in memory of its own."""
        (left, right), *others = self.pairs
        if left.dtype != torch.bfloat16:
            return torch.mm(left, right)
        total = torch.mm(left, right, out_dtype=torch.float32)
        for left, right in others:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return total


def pending_product(left: Tensor, right: Tensor) -> PendingProduct:
    """`transposed_product`, to be multiplied later; float32 numbers that are taken in terms are split now."""
    flops = 2.0 * left.numel() * right.shape[1]
    if torch.bfloat16 in (left.dtype, right.dtype) or not _parts_pay(left, right, flops, precise=False):
        return PendingProduct([(left.to(wide(left)).mT, right.to(wide(right)))])
    pieces = zip(left.split(tuning.TERMS_LONGEST_SUM), right.split(tuning.TERMS_LONGEST_SUM), strict=True)
    return PendingProduct([(a.mT, b) for piece in pieces for a, b in _stacks(*piece)])


def times(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """`left·right` for each group."""
    if _is_one_matrix(left):
        return torch.mm(left[0], right[0])[None]
    return torch.bmm(left, right, out=out)


def _is_one_matrix(array: Tensor) -> bool:
    """Whether a product should be one of matrices, not a batched one, since there is one group.

    Under a compiler: Inductor's template for a batched product on a CPU fails where several operations read the result
    (torch 2.13).
    """
    return torch.compiler.is_compiling() and array.dim() == 3 and len(array) == 1


def square(A: Tensor) -> Tensor:
    """`AAᵀ [groups, samples, samples]` for A `[groups, samples, features]`; in float32 where A is bfloat16."""
    if _half_pays(A, A.shape[-2]):
        return _half(A.to(wide(A)))
    large = 2.0 * A.numel() * A.shape[1] > tuning.SQUARE_LEAST_FLOPS
    if A.is_cuda and len(A) == 1 and large and A.dtype != torch.bfloat16:
        return transposed_product(A[0].mT.contiguous())[None]
    return multiply(A, A.mT)


def transposed_square(A: Tensor) -> Tensor:
    """`AᵀA [groups, features, features]` for A `[groups, samples, features]`; in float32 where A is bfloat16."""
    if _half_pays(A, A.shape[-1]):
        return _half(A.mT.to(wide(A)))
    if len(A) > 1:
        return multiply(A.mT, A)
    float16_pays = (
        device.use_fp16_products(A) and device.tf32_allowed() and min(A.shape[1:]) >= tuning.FP16_LEAST_SIZE
    )
    return (square_in_float16 if float16_pays else transposed_product)(A[0])[None]


def square_in_float16(A: Tensor) -> Tensor:
    """`AᵀA [features, features]` of A `[samples, features]`, as accurate as TF32's.

    Float16 has as many bits, and by columns a GPU multiplies it over twice as fast. A power of two brings the largest
    number to 2¹⁴; then those are lost that are below 2⁻³⁸ of it.
    """
    _, exponent = torch.frexp(torch.linalg.vector_norm(A, torch.inf))
    exponent = exponent.clamp(min=-48) - 14
    scaled = torch.mul(A, torch.exp2(-exponent), out=A.new_empty(A.shape, dtype=torch.float16))
    return multiply(scaled.mT, scaled).mul_(torch.exp2(2 * exponent))


def wide(array: Tensor) -> torch.dtype:
    """The precision of sums over an array: float32, or float64 where it is."""
    return torch.promote_types(array.dtype, torch.float32)


def _half_pays(A: Tensor, size: int) -> bool:
    """Whether half of a symmetric product of this size is less work than the whole, rather than more calls."""
    return (
        A.device.type == "cpu" and size >= 2 * tuning.CPU_SQUARE_BLOCK and not torch.compiler.is_compiling()
    )


def _half(left: Tensor) -> Tensor:
    """`left·leftᵀ` by the blocks on and below its diagonal, which are then mirrored."""
    size = left.shape[-2]
    product = left.new_empty(*left.shape[:-1], size)
    for start in range(0, size, tuning.CPU_SQUARE_BLOCK):
        end = start + tuning.CPU_SQUARE_BLOCK
        columns = left[..., start:, :] @ left[..., start:end, :].mT
        product[..., start:, start:end] = columns
        product[..., start:end, end:] = columns[..., tuning.CPU_SQUARE_BLOCK :, :].mT
    return product


class Product(Protocol):
    """A product that sums over the rows of its factors."""

    def __call__(self, left: Tensor, right: Tensor, total: Tensor | None) -> Tensor:
        """Return it, or add it to a total and return that."""


def in_parts(product: Product, factors: list[Tensor], flops: float, precise: bool = False) -> Tensor:
    """A product, taken over parts where that is faster.

    Args:
        product: of two factors, or of as many rows of parts above one another.
        factors: `[rows, m]` and `[rows, n]`, or one that is both: then they share parts. The list is emptied, so that
            what nobody else keeps is freed before the product of its last piece.
        flops: of the product.
        precise: whether TF32 is not enough, even where the caller allows it.
    """
    if not _parts_pay(factors[0], factors[-1], flops, precise):
        factors = [factor.to(wide(factors[0])) for factor in factors]
        return product(factors[0], factors[-1], None)
    if all(factor.dtype == torch.bfloat16 for factor in factors):
        return product(factors[0], factors[-1], None)
    pieces = list(zip(*(factor.split(tuning.TERMS_LONGEST_SUM) for factor in factors), strict=True))
    factors.clear()
    total: Tensor | None = None
    while pieces:
        for left, right in _stacks(*pieces.pop(0)):
            total = product(left, right, total)
        del left, right  # before there are the next
    assert total is not None
    return total


def multiply(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """`left·right`, with float32 sums of bfloat16 or float16 products; matrices can add it to a total."""
    if _is_one_matrix(left):
        return multiply(left[0], right[0])[None]
    half = left.dtype in (torch.bfloat16, torch.float16)
    # torch has products with sums of another precision on a GPU alone, and can't count their FLOPs
    if half and (is_transformed(left) or not left.is_cuda):
        left, right, half = left.float(), right.float(), False
    product = torch.bmm if left.dim() == 3 else torch.mm
    if total is None:
        if half:
            return product(left, right, out_dtype=torch.float32)
        return product(left, right, out=_large_array(left, right))
    if half:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.addmm_(left, right)


def _large_array(left: Tensor, right: Tensor) -> Tensor | None:
    """Where to write a large product on a CPU; None where torch is to find the memory."""
    if left.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    shape = *left.shape[:-1], right.shape[-1]
    if (
        prod(shape) * left.element_size() < tuning.HUGE_PAGE_LEAST_BYTES
        or is_transformed(left)
        or is_transformed(right)
    ):
        return None
    return in_huge_pages(left.new_empty(shape))


def _stacks(left: Tensor, right: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Bfloat16 factors whose products add up to that of left and right, or left; a bfloat16 number has one part."""
    rows = len(left)
    if right is None:
        parts = _split(left, WALK)
        return [(parts[:-rows], parts[rows:])]
    if left.dtype == torch.bfloat16:
        return [(left.repeat(3, 1), _split(right, SMALLEST_FIRST))]
    if right.dtype == torch.bfloat16:
        return [(_split(left, SMALLEST_FIRST), right.repeat(3, 1))]
    if not _two_pay(left, right):
        return [(_split(left, LEFT), _split(right, RIGHT))]
    if left.shape[1] < right.shape[1]:  # then right is held in fewer blocks
        return [(b, a) for a, b in _in_two(right, left)]
    return _in_two(left, right)


def _in_two(left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Stacks that share their blocks, each of which begins where a GPU likes it to."""
    rows = device.round_up(len(left), tuning.ALIGNED)
    left, right = _split(left, LEFT_IN_TWO, rows), _split(right, RIGHT_IN_TWO, rows)
    return [(left[:-rows], right[2 * rows :]), (left[rows:], right[: 3 * rows])]


def _two_pay(left: Tensor, right: Tensor) -> bool:
    """Whether parts in one stack would take much memory, also beside their product."""
    stacked = torch.bfloat16.itemsize * len(LEFT) * (left.numel() + right.numel())
    return stacked >= max(
        tuning.TERMS_LEAST_SPLIT_BYTES, left.element_size() * left.shape[1] * right.shape[1] // 2
    )


def _split(x: Tensor, order: tuple[int, ...], rows: int | None = None) -> Tensor:
    """`plain_parts`, by a kernel where there is Triton."""
    rows = len(x) if rows is None else rows
    if not device.use_triton(x):
        return plain_parts(x, order, rows)
    from proxprop.kernels import split_bf16

    return split_bf16.parts(x, order, rows)


def _parts_pay(left: Tensor, right: Tensor, flops: float, precise: bool) -> bool:
    """Whether torch would multiply on float32 units what tensor cores do faster in parts, or less precisely."""
    if not left.is_cuda or torch.compiler.is_compiling():
        return False
    if torch.bfloat16 in (left.dtype, right.dtype):
        return True
    worthwhile = precise if device.tf32_allowed() else flops >= tuning.TERMS_LEAST_FLOPS
    if left.shape[1] % 8 or right.shape[1] % 8 or not worthwhile:
        return False
    return device.has_fast_bfloat16(left) and device.use_triton(right)


def plain_parts(x: Tensor, order: tuple[int, ...], rows: int) -> Tensor:
    """Bfloat16 parts of x `[up to rows, columns]` in this order, above one another: `[len(order)·rows, columns]`.

    Each has zeros behind the rows of x.
    """
    x, found = functional.pad(x, (0, 0, 0, rows - len(x))) if rows > len(x) else x, []
    for _ in range(2):
        head = (x.view(torch.int32) & -65536).view(torch.float32)  # the leading eight bits
        found.append(head.bfloat16())
        x = x - head
    found.append(x.bfloat16())
    return torch.cat([found[part] for part in order])
