"""`leftᵀ·right` of float32 matrices on a GPU's tensor cores, as accurate as a float32 product.

A float32 number above 1e-33 is exactly the sum of three bfloat16 terms of eight bits each. Six of the nine products of
terms reach float32's last bit. Their operands are stacked along the inner dimension of one bfloat16 product with
float32 sums, the smallest terms first: six times the work at fifteen times the rate. Where the stacks would take much
memory, two products share the terms that one product would hold twice.

Tensor cores truncate when they add to a sum, so long sums come out too small. Therefore long inner dimensions are
summed in pieces. Operands that come in bfloat16 have far larger rounding of their own: for two of them there is one
product, as in BackProp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from proxprop import device, tuning
from proxprop.solvers.huge_pages import in_huge_pages

LEFT, RIGHT = (0, 2, 1, 0, 1, 0), (2, 0, 1, 1, 0, 0)
"""Terms of left and right that are multiplied with each other, counted from the largest."""

LEFT_IN_TWO, RIGHT_IN_TWO = (2, 1, 0, 0), (0, 1, 0, 1, 2)
"""The same terms for two products of three: first three of left with last three of right, then last with first."""

WALK = (0, 2, 0, 1, 1, 0, 0)
"""Order in which every pair of LEFT and RIGHT is adjacent once, so that one stack holds both operands of a square."""

SMALLEST_FIRST = (2, 1, 0)
"""Terms of an operand whose partner is bfloat16 and has one term."""

LONGEST_SUM = 256
"""Rows that a CPU sums in one piece, as libraries do for matrices that are not very narrow."""

SUMMED_IN_PIECES = 32
"""Fewest features for which libraries sum rows in pieces; for fewer they sum all rows in one."""


def transposed_product(left: Tensor, right: Tensor | None = None, precise: bool = False) -> Tensor:
    """`leftᵀ·right [m, n]` for left `[rows, m]` and right `[rows, n]` or left; in float32 where one is bfloat16.

    Args:
        left: first operand. If the caller does not keep it and it is split into terms, it is freed before the product.
        right: second operand, likewise; left if None.
        precise: whether TF32 is not enough, even where the caller allows it.
    """
    operands = [left] if right is None else [left, right]
    del left, right
    flops = 2.0 * operands[0].numel() * operands[-1].shape[1]
    return in_terms(lambda a, b, total: multiply(a.mT, b, total), operands, flops, precise)


@dataclass(frozen=True)
class PendingProduct:
    """A product that is yet to be multiplied.

    Attributes:
        pairs: operands `[m, rows]` and `[rows, n]`; the sum of their products is the result.
    """

    pairs: list[tuple[Tensor, Tensor]]

    def multiply(self) -> Tensor:
        """The product `[m, n]`, in memory of its own."""
        total: Tensor | None = None
        for left, right in self.pairs:
            total = multiply(left, right, total)
        assert total is not None
        return total


def pending_product(left: Tensor, right: Tensor) -> PendingProduct:
    """Prepare `transposed_product` for later: operands are split into terms now."""
    flops = 2.0 * left.numel() * right.shape[1]
    if torch.bfloat16 in (left.dtype, right.dtype) or not _terms_pay(left, right, flops, precise=False):
        return PendingProduct([(widened(left).mT, widened(right))])
    return PendingProduct([(a.mT, b) for piece in _pieces([left, right]) for a, b in _stacks(*piece)])


def times(left: Tensor, right: Tensor) -> Tensor:
    """`left·right` for each group."""
    return torch.mm(left[0], right[0])[None] if _is_one_matrix(left) else torch.bmm(left, right)


def _is_one_matrix(array: Tensor) -> bool:
    """Whether to multiply matrices rather than batches, because a compiler is at work and there is one group.

    Inductor's template for a batched product on a CPU fails where several operations read the result (torch 2.13).
    """
    return torch.compiler.is_compiling() and array.dim() == 3 and len(array) == 1


def square(A: Tensor) -> Tensor:
    """`AAᵀ [groups, samples, samples]` for A `[groups, samples, features]`; in float32 where A is bfloat16."""
    if _symmetry_pays(A, A.shape[-2]):
        return _symmetric(widened(A))
    large = 2.0 * A.numel() * A.shape[1] > tuning.SQUARE_LEAST_FLOPS
    if A.is_cuda and len(A) == 1 and large and A.dtype != torch.bfloat16:
        return transposed_product(A[0].mT.contiguous())[None]
    return multiply(A, A.mT)


def transposed_square(A: Tensor, ones: bool = False, dense: bool = False) -> Tensor:
    """`AᵀA [groups, features, features]` for A `[groups, samples, features]`; in float32 where A is bfloat16.

    A may lack the dimension of groups, and then S does too, which saves calls.

    Args:
        A: the rows.
        ones: whether a column of ones comes behind A's, for a bias.
        dense: whether the rows of the result should lie without gaps where that costs no copy.
    """
    if A.is_cuda and device.use_symmetric_square(A):
        from proxprop.kernels import symmetric_square

        S = symmetric_square.transposed_square(A if A.dim() == 2 else A[0], ones, dense)
        return S if A.dim() == 2 else S[None]
    samples, features = A.shape[-2:]
    if ones:  # a copy of A takes fewer calls than bordering the product; a GPU likes aligned ones
        wide_enough = features + 1 if not A.is_cuda else device.round_up(features + 1, tuning.ALIGNED)
        S = transposed_square(torch.constant_pad_nd(A, (0, wide_enough - features), 1.0))
        return S if wide_enough == features + 1 else S[..., : features + 1, : features + 1]
    if _symmetry_pays(A, features):
        return _symmetric(widened(A.mT))
    if features < SUMMED_IN_PIECES and samples > 2 * LONGEST_SUM and A.device.type == "cpu":
        return _sum_of_squares(widened(A))
    if A.dim() == 3:
        return multiply(A.mT, A) if len(A) > 1 else transposed_square(A[0])[None]
    if (
        device.use_fp16_products(A)
        and device.tf32_allowed()
        and min(samples, features) >= tuning.FP16_LEAST_SIZE
    ):
        return square_in_float16(A)
    if _terms_pay(A, A, 2.0 * samples * features * features, False):
        return transposed_product(A)
    A = widened(A)
    return multiply(A.mT, A)


def _sum_of_squares(A: Tensor) -> Tensor:
    """`AᵀA` from pieces of rows: equal rows round in the same direction, so one long sum would drift away."""
    if A.dim() == 2:
        return _sum_of_squares(A[None])[0]
    groups, samples, features = A.shape
    whole = samples // LONGEST_SUM * LONGEST_SUM
    pieces = A[:, :whole].reshape(-1, LONGEST_SUM, features)
    S = torch.bmm(pieces.mT, pieces).view(groups, -1, features, features).sum(1)
    rest = A[:, whole:]
    return S.baddbmm_(rest.mT, rest)


def square_in_float16(A: Tensor) -> Tensor:
    """`AᵀA [features, features]` for A `[samples, features]`, as accurate as in TF32.

    Float16 has as many bits as TF32, and a GPU multiplies its columns over twice as fast. A power of two scales the
    largest number to about 2¹⁴. Numbers below 2⁻³⁸ of the largest are lost.
    """
    _, exponent = torch.frexp(torch.linalg.vector_norm(A, torch.inf))
    exponent = exponent.clamp(min=-48) - 14
    scaled = torch.mul(A, torch.exp2(-exponent), out=A.new_empty(A.shape, dtype=torch.float16))
    return transposed_square(scaled).mul_(torch.exp2(2 * exponent))


def cast(array: Tensor, dtype: torch.dtype) -> Tensor:
    """An array in this precision. If it already has it, torch is not called."""
    return array if array.dtype == dtype else array.to(dtype)


def widened(array: Tensor) -> Tensor:
    """An array in the precision of sums over it."""
    dtype = device.precision(array)
    # not by `cast`, which would be one more call for every observed layer
    return array if array.dtype == dtype else array.to(dtype)


def _symmetry_pays(A: Tensor, size: int) -> bool:
    """Whether to compute only half of a symmetric product of this size; for small ones the calls cost more."""
    large = size >= 2 * tuning.CPU_SQUARE_BLOCK
    return large and A.device.type == "cpu" and not torch.compiler.is_compiling()


def _symmetric(left: Tensor) -> Tensor:
    """`left·leftᵀ`, computed on and below the diagonal, by blocks of columns, and mirrored."""
    size = left.shape[-2]
    product = left.new_empty(*left.shape[:-1], size)
    for start in range(0, size, tuning.CPU_SQUARE_BLOCK):
        end = start + tuning.CPU_SQUARE_BLOCK
        columns = left[..., start:, :] @ left[..., start:end, :].mT
        product[..., start:, start:end] = columns
        product[..., start:end, end:] = columns[..., tuning.CPU_SQUARE_BLOCK :, :].mT
    return product


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Multiplies left and right, summing over their rows, and adds to a total if there is one."""


def in_terms(product: Product, operands: list[Tensor], flops: float, precise: bool = False) -> Tensor:
    """Multiply, in bfloat16 terms where they are faster.

    Args:
        product: multiplies two operands, or stacks of their terms.
        operands: `[rows, m]` and `[rows, n]`, or one matrix that is both. The list is emptied, so that operands nobody
            else keeps are freed before the last product.
        flops: FLOPs of the product.
        precise: whether TF32 is not enough, even where the caller allows it.
    """
    if not _terms_pay(operands[0], operands[-1], flops, precise):
        operands = [cast(operand, device.precision(operands[0])) for operand in operands]
        return product(operands[0], operands[-1], None)
    if all(operand.dtype == torch.bfloat16 for operand in operands):
        return product(operands[0], operands[-1], None)
    pieces = _pieces(operands)
    operands.clear()
    total: Tensor | None = None
    while pieces:
        for left, right in _stacks(*pieces.pop(0)):
            total = product(left, right, total)
        del left, right  # before the next stacks are made
    assert total is not None
    return total


def _pieces(operands: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """The operands, cut into as many rows as tensor cores should sum at once."""
    return list(zip(*(operand.split(tuning.TERMS_LONGEST_SUM) for operand in operands), strict=True))


def multiply(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """`left·right`, in float32 where they have 16 bits; a product of matrices can be added to a total."""
    if _is_one_matrix(left):
        return multiply(left[0], right[0])[None]
    short = left.dtype in (torch.bfloat16, torch.float16)
    # torch has products with float32 sums of 16-bit numbers on a GPU only, and can't count their FLOPs
    if short and (device.is_transformed(left) or not left.is_cuda):
        left, right, short = left.float(), right.float(), False
    product = torch.bmm if left.dim() == 3 else torch.mm
    if total is None:
        if short:
            return product(left, right, out_dtype=torch.float32)
        return product(left, right, out=_large_array(left, right))
    if short:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.addmm_(left, right)


def _large_array(left: Tensor, right: Tensor) -> Tensor | None:
    """Memory for a large product on a CPU; None where torch should find the memory."""
    if left.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    shape = *left.shape[:-1], right.shape[-1]
    small = prod(shape) * left.element_size() < tuning.HUGE_PAGE_LEAST_BYTES
    if small or device.is_transformed(left) or device.is_transformed(right):
        return None
    return in_huge_pages(left.new_empty(shape))


def _stacks(left: Tensor, right: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Stacks of bfloat16 terms whose products add up to that of left and right (left if None).

    A bfloat16 number is its own only term.
    """
    rows = len(left)
    if right is None:
        stack = _split(left, WALK)
        return [(stack[:-rows], stack[rows:])]
    if left.dtype == torch.bfloat16:
        return [(left.repeat(3, 1), _split(right, SMALLEST_FIRST))]
    if right.dtype == torch.bfloat16:
        return [(_split(left, SMALLEST_FIRST), right.repeat(3, 1))]
    if not _two_pay(left, right):
        return [(_split(left, LEFT), _split(right, RIGHT))]
    if left.shape[1] < right.shape[1]:  # the operand with more columns is held in fewer terms
        return [(b, a) for a, b in _in_two(right, left)]
    return _in_two(left, right)


def _in_two(left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Operands of two products that share their terms; each term begins at an aligned row."""
    rows = device.round_up(len(left), tuning.ALIGNED)
    left, right = _split(left, LEFT_IN_TWO, rows), _split(right, RIGHT_IN_TWO, rows)
    return [(left[:-rows], right[2 * rows :]), (left[rows:], right[: 3 * rows])]


def _two_pay(left: Tensor, right: Tensor) -> bool:
    """Whether the stacks of one product would take much memory, also compared with the product."""
    stacked = torch.bfloat16.itemsize * len(LEFT) * (left.numel() + right.numel())
    product = left.element_size() * left.shape[1] * right.shape[1]
    return stacked >= max(tuning.TERMS_LEAST_SPLIT_BYTES, product // 2)


def _split(x: Tensor, order: tuple[int, ...], rows: int | None = None) -> Tensor:
    """Split x into a stack of bfloat16 terms; `plain_terms` without Triton."""
    rows = len(x) if rows is None else rows
    if not device.use_triton(x):
        return plain_terms(x, order, rows)
    from proxprop.kernels import split_bf16

    return split_bf16.terms(x, order, rows)


def _terms_pay(left: Tensor, right: Tensor, flops: float, precise: bool) -> bool:
    """Whether tensor cores multiply terms faster, or more precisely, than torch multiplies the float32 numbers."""
    if not left.is_cuda or torch.compiler.is_compiling():
        return False
    if torch.bfloat16 in (left.dtype, right.dtype):
        return True
    worthwhile = precise if device.tf32_allowed() else flops >= tuning.TERMS_LEAST_FLOPS
    if left.shape[1] % 8 or right.shape[1] % 8 or not worthwhile:
        return False
    return device.has_fast_bfloat16(left) and device.use_triton(right)


def plain_terms(x: Tensor, order: tuple[int, ...], rows: int) -> Tensor:
    """Bfloat16 terms of x `[up to rows, columns]` in this order, stacked: `[len(order)·rows, columns]`.

    Rows of each term beyond the rows of x are zero.
    """
    if rows > len(x):
        x = functional.pad(x, (0, 0, 0, rows - len(x)))
    terms = []
    for _ in range(2):
        head = (x.view(torch.int32) & -65536).view(torch.float32)  # the leading eight bits
        terms.append(head.bfloat16())
        x = x - head
    terms.append(x.bfloat16())
    return torch.cat([terms[term] for term in order])
