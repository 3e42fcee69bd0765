"""The Triton kernels compile for a GPU, which need not be there; the interpreter accepts code that the compiler rejects."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dry_gpu import GPU, dry_gpu, without_a_gpu  # noqa: E402
from proxprop.kernels import averaging, cholesky, feature_cg, rotation, sample_cg, split_bf16, split_fp16  # noqa: E402
from proxprop.kernels import symmetric_square as symmetric  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.filterwarnings(
        "ignore:AnnAssign.__init__ missing:DeprecationWarning"
    ),  # of Triton on Python 3.13
]
TERMS = {"TERMS_OF_RHO": "*fp16", "TERMS_OF_SEARCH": "*fp16", "TERMS_OF_M": "*fp16", "TERMS_OF_X": "*bf16"}
FLOATS = dict.fromkeys(("damping", "decay", "epsilon", "least_share", "root", "scale"), "fp32")
TYPES = {**TERMS, **FLOATS, "A": "*bf16", "FAILED": "*i1", "LEFT_OUT": "*i1", "LOST": "*i1", "SPOILT": "*i1"}
MOST_SHARED_BYTES = 227 * 1024
"""Of a block on a GPU of compute capability 9.0."""

STEPS = [(True, False), (False, False), (False, True), (True, True)]
KERNELS = [
    (averaging._take_in, {"NUMBERS": 4096}, 4),
    (cholesky._begin, {"TILE": 32}, 1),
    (cholesky._eliminate, {"FIRST": True, "TILE": 32}, 1),
    (cholesky._eliminate, {"FIRST": False, "TILE": 32}, 1),
    (cholesky._mend, {"SIZE": 512}, 4),
    *[(rotation._rotate, {"ROWS": rows, "COLUMNS": 16}, 8) for rows in (128, 1024)],
    (split_bf16._split, {"ORDER": (0, 2, 1), "NUMBERS": 1024}, 4),
    *[(split_fp16._split_row, {"TERMS": terms, "COLUMNS": 512}, 4) for terms in (1, 3)],
    *[(split_fp16._stack, {"BY_ROWS": by_rows, "NUMBERS": 1024}, 4) for by_rows in (True, False)],
    *[
        (symmetric._multiply, {"ONES": True, "SPLIT": split, "TILE": 128, "DEPTH": 64}, 8)
        for split in (True, False)
    ],
    (symmetric._add, {"ONES": True, "TILE": 128, "ROWS": 32}, 4),
    *[
        (sample_cg._begin, {"ROTATE": rotate, "TERMS": terms, "SAMPLES": 512, "OUTPUTS": 16}, 8)
        for rotate, terms in [(False, 1), (True, 3)]
    ],
    *[
        (sample_cg._advance, {"TERMS": terms, "SAMPLES": 512, "OUTPUTS": 2, "FIRST": first, "LAST": last}, 4)
        for first, last in STEPS
        for terms in (1, 3)
    ],
    (feature_cg._begin, {"TERMS": 3, "ROWS": 512, "COLUMNS": 8}, 8),
    *[
        (kernel, {"TERMS": 3, "ROWS": 512, "COLUMNS": 8, "FIRST": first, "LAST": last}, 8)
        for kernel in (feature_cg._advance, feature_cg._advance_whole)
        for first, last in STEPS[1:]
    ],
]


@pytest.mark.parametrize(
    ("kernel", "constants", "warps"), KERNELS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_kernel_compiles_for_a_gpu(kernel, constants: dict[str, object], warps: int) -> None:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert kernel.__name__ in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= MOST_SHARED_BYTES


def type_of(argument: str) -> str:
    return TYPES.get(argument, "*fp32" if argument.isupper() else "i32")


GIVEN = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.bool: "*i1", int: "i32", float: "fp32",
}  # fmt: skip


@without_a_gpu
def test_kernels_are_compiled_for_what_they_are_given() -> None:
    with dry_gpu() as work:
        M, B = torch.empty(2, 40, 40, device=GPU), torch.empty(2, 40, 24, device=GPU)
        averaging.take_in(M, M.clone(), torch.empty(3, device=GPU, dtype=torch.bool), 1, 0.5)
        cholesky.inverse_factor(M, 1.0, 1e-6)
        rotation.rotate(B)
        rotation.rotate(torch.empty(1, 2000, 8, device=GPU))
        split_bf16.terms(B[0], (0, 2, 1), 40)
        split_fp16.stack(B, 1, 4.0)
        symmetric.transposed_square(torch.empty(8192, 768, device=GPU, dtype=torch.bfloat16), True, True)
        for features in (M, torch.empty(1, 1100, 1100, device=GPU)):
            feature_cg.feature_cg(features, features[..., :24], 1.0, 3, 3)
        for terms in (1, 3):
            sample_cg.sample_cg(M, B, 1.0, 3, terms, True)
    compiled = {(kernel.__name__, kernel.__module__): (kernel, constants) for kernel, constants, _ in KERNELS}
    launched = {(launch.kernel.__name__, launch.kernel.__module__) for launch in work.launches}
    assert launched == set(compiled)
    for launch in work.launches:
        kernel, constants = compiled[launch.kernel.__name__, launch.kernel.__module__]
        assert {name for name in kernel.arg_names if name in constants} == set(constants)
        for name, value in launch.given.items():
            if name not in constants:
                kind = value.dtype if isinstance(value, torch.Tensor) else type(value)
                assert GIVEN[kind] == type_of(name), f"{kernel.__name__}: {name}"
