"""Products in terms are as accurate as float32's."""

import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cases import relative_error
from proxprop import CG, device, tuning
from proxprop.direction import solve
from proxprop.settings import Settings
from proxprop.solvers import matmul
from proxprop.solvers.matmul import (
    LEFT,
    LEFT_IN_TWO,
    RIGHT,
    RIGHT_IN_TWO,
    SMALLEST_FIRST,
    WALK,
    plain_terms,
    square,
    square_in_float16,
    transposed_product,
    transposed_square,
)
from proxprop.transfer import LinearTransfer

SCALES = {
    "one scale": torch.ones(40),
    "columns of every scale": torch.logspace(-15, 15, 40),
    "small": torch.full((40,), 1e-32),
    "large": torch.full((40,), 1e36),
}


def operands(rows: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 40, generator=generator), torch.randn(rows, 50, generator=generator)


def in_float64(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    product = left.double() @ right.double()
    return product if total is None else total.add_(product)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
def test_six_products_of_terms_are_as_accurate_as_a_float32_product(scale: torch.Tensor) -> None:
    left, right = operands()
    left = left * scale
    in_terms = plain_terms(left, LEFT, 300).double().mT @ plain_terms(right, RIGHT, 300).double()
    precise = left.double().mT @ right.double()
    for found, expected, plain in zip(
        in_terms, precise, left.mT @ right, strict=True
    ):  # every output for itself
        assert relative_error(found, expected) < max(2e-7, relative_error(plain.double(), expected))


@pytest.mark.parametrize("longest", [1024, 100, 77])
@pytest.mark.parametrize(("left", "right"), [(40, 50), (50, 40), (40, 40)])
def test_two_products_that_share_terms_equal_one(
    left: int, right: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = torch.randn(300, left), torch.randn(300, right)
    made = []
    monkeypatch.setattr(
        matmul,
        "_split",
        lambda x, order, rows: made.append((x.shape[1], order)) or plain_terms(x, order, rows),
    )
    monkeypatch.setattr(matmul, "_terms_pay", lambda *_: True)
    monkeypatch.setattr(tuning, "TERMS_LEAST_SPLIT_BYTES", 1)
    monkeypatch.setattr(tuning, "TERMS_LONGEST_SUM", longest)
    monkeypatch.setattr(matmul, "multiply", in_float64)
    assert relative_error(transposed_product(A, B), A.double().mT @ B.double()) < 2e-7
    fewer, more = LEFT_IN_TWO, RIGHT_IN_TWO
    assert set(made) == {(left, fewer if left >= right else more), (right, more if left >= right else fewer)}


def test_the_largest_terms_meet_last() -> None:
    """Tensor cores truncate when they add to a sum, so nothing small may follow."""
    first = zip(LEFT_IN_TWO[:3], RIGHT_IN_TWO[2:], strict=True)
    second = zip(LEFT_IN_TWO[1:], RIGHT_IN_TWO[:3], strict=True)
    one, two = [*zip(LEFT, RIGHT, strict=True)], [*first, *second]
    assert sorted(one) == sorted(two)
    assert one[-1] == two[-1] == (0, 0)


@pytest.mark.parametrize(
    ("rows", "left", "right", "two"),
    [(500, 4000, 3072, True), (500, 4000, 1000, False), (256, 8192, 8192, False), (1024, 768, 3072, True)],
)
def test_terms_are_shared_where_they_are_large_beside_their_product(
    rows: int, left: int, right: int, two: bool
) -> None:
    A, B = torch.empty(rows, left, device="meta"), torch.empty(rows, right, device="meta")
    assert matmul._two_pay(A, B) == two


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the terms are multiplied by a GPU")
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("left", "right"), [(4096, 512), (512, 4096)])
@pytest.mark.parametrize("rows", [1003, 2000])
def test_two_products_that_share_terms_are_accurate_on_a_gpu(
    rows: int, left: int, right: int, by_columns: bool
) -> None:
    A, B = torch.randn(rows, left, device="cuda"), torch.randn(rows, right, device="cuda")
    assert matmul._two_pay(A[: tuning.TERMS_LONGEST_SUM], B[: tuning.TERMS_LONGEST_SUM])
    A = A.mT.contiguous().mT if by_columns else A
    assert relative_error(transposed_product(A, B).double(), A.double().mT @ B.double()) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_product_is_added_to_a_total(dtype: torch.dtype) -> None:
    left, right = (operand.to(dtype) for operand in operands())
    product = matmul.multiply(left.mT, right)
    total = torch.ones_like(product)
    assert matmul.multiply(left.mT, right, total) is total
    torch.testing.assert_close(total, product + 1)


def test_a_walk_pairs_the_same_terms() -> None:
    assert sorted(pairwise(WALK)) == sorted(zip(LEFT, RIGHT, strict=True))


@pytest.mark.parametrize("longest", [1024, 100, 77])
def test_a_product_with_itself_shares_terms(longest: int, monkeypatch) -> None:
    """As on a GPU, except for the multiplication itself."""
    made = []
    split = matmul._split
    monkeypatch.setattr(matmul, "_split", lambda x, order: made.append(order) or split(x, order))
    monkeypatch.setattr(matmul, "_terms_pay", lambda *_: True)
    monkeypatch.setattr(tuning, "TERMS_LONGEST_SUM", longest)
    monkeypatch.setattr(matmul, "multiply", in_float64)
    A = operands()[0]
    precise = A.double().mT @ A.double()
    assert relative_error(transposed_square(A[None])[0], precise) < 2e-7
    assert set(made) == {WALK}
    assert relative_error(transposed_product(A, A), precise) < 2e-7
    assert {LEFT, RIGHT} < set(made)


def test_an_operand_that_the_caller_does_not_keep_is_freed_before_its_product(monkeypatch) -> None:
    monkeypatch.setattr(matmul, "_terms_pay", lambda *_: True)
    storages, freed = [], []

    def made() -> torch.Tensor:
        A = torch.ones(5, 8)
        storages.append(StorageWeakRef(A.untyped_storage()))
        return A

    def product(left: Tensor, right: Tensor, total: None) -> Tensor:
        freed.append(storages[0].expired())
        return left.float().mT @ right.float()

    found = matmul.in_terms(product, [made()], flops=0.0)
    assert torch.equal(found, torch.full((8, 8), 5.0))
    assert freed == [True]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_solution_in_sample_space_is_freed_before_the_weights_product(
    transposed: bool, monkeypatch
) -> None:
    monkeypatch.setattr(matmul, "_terms_pay", lambda *_: True)
    storages, freed = [], []

    class Watched(CG):
        def samples(self, K, G, damping):
            solution = super().samples(K, G, damping)
            storages.append(StorageWeakRef(solution.value.untyped_storage()))
            return solution

    def multiply(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
        freed.extend(storage.expired() for storage in storages)
        return in_float64(left, right, total).float()

    monkeypatch.setattr(matmul, "multiply", multiply)
    left, right = operands()
    shapes = [torch.Size([40, 50] if transposed else [50, 40]), torch.Size([50])]
    transfer = LinearTransfer([left], right, shapes, transposed)
    solve(transfer, right, Settings(Watched(), space="sample"))
    assert freed == [True]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.14159274, 3.4e38, -1.2e-32])
def test_three_terms_add_up_to_the_number(value: float) -> None:
    x = torch.tensor([[value]])
    assert plain_terms(x, SMALLEST_FIRST, 1).float().sum().item() == x.item()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_terms_of_what_is_not_finite_are_not_finite(value: float) -> None:
    assert not bool(plain_terms(torch.tensor([[value]]), SMALLEST_FIRST, 1).isfinite().all())


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_bfloat16_operand_is_multiplied_in_float32(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for left, right in (operands(), operands()[::-1]):
        left, right = left.to(dtypes[0]), right.to(dtypes[1])
        found = transposed_product(left, right)
        assert found.dtype == torch.float32
        assert relative_error(found.double(), left.double().mT @ right.double()) < 1e-6


@pytest.mark.parametrize(
    "size",
    [
        1,
        2 * tuning.CPU_SQUARE_BLOCK - 1,
        2 * tuning.CPU_SQUARE_BLOCK,
        2 * tuning.CPU_SQUARE_BLOCK + 1,
        3 * tuning.CPU_SQUARE_BLOCK + 40,
    ],
)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_a_symmetric_product_computed_by_half_is_the_whole(size: int, groups: int, strided: bool) -> None:
    A = torch.randn(groups, size, 7, dtype=torch.float64)
    A = A[:, :, ::2] if strided else A
    for found, whole in ((square(A), A @ A.mT), (transposed_square(A.mT), A @ A.mT)):
        assert relative_error(found, whole) < 1e-14


def test_a_symmetric_product_of_bfloat16_numbers_is_in_float32() -> None:
    A = torch.randn(1, 40, 2 * tuning.CPU_SQUARE_BLOCK).bfloat16()
    found = transposed_square(A)
    assert found.dtype == torch.float32
    assert relative_error(found.double(), A.double().mT @ A.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_column_of_ones_comes_behind_the_rows(dtype: torch.dtype) -> None:
    A = torch.randn(1, 40, 30).to(dtype)
    with_ones = torch.cat([A.double(), torch.ones(1, 40, 1, dtype=torch.float64)], 2)
    assert relative_error(transposed_square(A, ones=True).double(), with_ones.mT @ with_ones) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU computes half of the products")
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("samples", "features"), [(8192, 768), (1003, 264), (257, 300), (3000, 3072), (9000, 256)]
)
def test_half_of_a_square_is_enough_on_a_gpu(
    samples: int, features: int, dtype: torch.dtype, ones: bool
) -> None:
    A = (torch.randn(samples, features, device="cuda") + 1).to(dtype)
    assert device.use_symmetric_square(A)
    S, exact = transposed_square(A, ones, dense=True), A.double()
    exact = torch.cat([exact, torch.ones_like(exact[:, :1])], 1) if ones else exact
    assert S.is_contiguous()
    assert torch.equal(S, S.mT)
    assert relative_error(S.double(), exact.mT @ exact) < 1e-5
    assert torch.equal(transposed_square(A[None], ones)[0], S)


def test_float64_stays_float64() -> None:
    left, right = (operand.double() for operand in operands())
    assert torch.equal(transposed_product(left, right), left.mT @ right)
    assert square(left[None]).dtype == transposed_square(left[None]).dtype == torch.float64


def test_terms_do_not_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(matmul, "_terms_pay", lambda *asked: True)
    left, right = operands()
    found = transposed_product(left.bfloat16(), right)
    assert relative_error(found.double(), left.bfloat16().double().mT @ right.double()) < 1e-6


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_square_in_float16_is_as_accurate_as_tf32s(size: float) -> None:
    A = operands()[0] * size
    A[:, 1] *= 1e-6
    A[:, 2] = 0.0
    precise = A.double().mT @ A.double()
    side = precise.diagonal().sqrt()
    error = (square_in_float16(A).double() - precise).abs()
    assert bool((error <= 2e-4 * side[:, None] * side).all())


def test_a_square_in_float16_lets_what_is_not_finite_through() -> None:
    A = operands()[0]
    A[3, 4] = float("nan")
    S = square_in_float16(A)
    assert bool(S[4].isnan().all())
    assert bool(S[:4, :4].isfinite().all())


def test_large_squares_are_in_float16_where_tf32_is_allowed(monkeypatch) -> None:
    A = operands()[0][None]
    seen = []
    monkeypatch.setattr(matmul, "square_in_float16", lambda A: seen.append(A.shape) or A.mT @ A)
    monkeypatch.setattr(matmul.device, "use_fp16_products", lambda A: True)
    monkeypatch.setattr(matmul.device, "tf32_allowed", lambda: True)
    monkeypatch.setattr(tuning, "FP16_LEAST_SIZE", 40)
    transposed_square(A)
    transposed_square(A[..., :39])
    assert seen == [(300, 40)]


@pytest.mark.parametrize("rows", [600, 5_000, 100_000])
@pytest.mark.parametrize("groups", [1, 2])
def test_sums_of_very_many_equal_rows_do_not_drift(groups: int, rows: int) -> None:
    A = torch.randn(groups, 1, 3, generator=torch.Generator().manual_seed(0)).expand(groups, rows, 3)
    assert relative_error(transposed_square(A).double(), A.double().mT @ A.double()) < 1e-5
