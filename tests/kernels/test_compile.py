"""The Triton kernels compile for a GPU, which need not be there; the interpreter accepts code that the compiler rejects."""

import os

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from proxprop.kernels import cholesky, feature_cg, rotation, sample_cg, split_bf16, split_fp16  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.filterwarnings(
        "ignore:AnnAssign.__init__ missing:DeprecationWarning"
    ),  # of Triton on Python 3.13
]
TERMS = {"TERMS_OF_RHO": "*fp16", "TERMS_OF_SEARCH": "*fp16", "TERMS_OF_M": "*fp16", "TERMS_OF_X": "*bf16"}
FLOATS = dict.fromkeys(("damping", "epsilon", "least_share", "root"), "fp32")
TYPES = {**TERMS, **FLOATS, "FAILED": "*i1", "LOST": "*i1"}
STEPS = [(True, False), (False, False), (False, True), (True, True)]
KERNELS = [
    (cholesky._begin, {"TILE": 32}, 1),
    (cholesky._eliminate, {"FIRST": True, "TILE": 32}, 1),
    (cholesky._eliminate, {"FIRST": False, "TILE": 32}, 1),
    (cholesky._mend, {"SIZE": 512}, 4),
    *[(kernel, {"ROWS": 128, "COLUMNS": 16}, 8) for kernel in (rotation._rotate, rotation._rotate_whole)],
    (split_bf16._split, {"ORDER": (0, 2, 1), "NUMBERS": 1024}, 4),
    *[(split_fp16._split_row, {"TERMS": terms, "COLUMNS": 512}, 4) for terms in (1, 3)],
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
    types = {name: TYPES.get(name, "*fp32" if name.isupper() else "i32") for name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert kernel.__name__ in compiled.asm["ptx"]
