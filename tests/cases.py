"""The one table of layers, solvers and spaces that the tests cross, and an oracle that shares no code with the package.

The oracle writes a layer's linear map out as a matrix, column by column from torch's own forward, and solves the
stacked system densely in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from proxprop import CG, Exact
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, Solver


@dataclass(frozen=True)
class LayerCase:
    name: str
    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]

    def layer(self) -> nn.Module:
        """A fresh float64 layer, the same every time."""
        torch.manual_seed(0)
        return self.make().double()

    def input(self) -> Tensor:
        return randn(*self.input_shape, seed=1)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAYERS = [
    LayerCase("linear-few-samples", lambda: nn.Linear(7, 4), (3, 7)),
    LayerCase("linear-many-samples", lambda: nn.Linear(3, 4), (11, 3)),
    LayerCase("linear-one-sample", lambda: nn.Linear(5, 2), (1, 5)),
    LayerCase("linear-unbatched", lambda: nn.Linear(5, 2), (5,)),
    LayerCase("linear-no-bias", lambda: nn.Linear(4, 3, bias=False), (6, 4)),
    LayerCase("linear-leading-dimensions", lambda: nn.Linear(3, 2), (2, 3, 2, 3)),
    LayerCase("linear-one-output", lambda: nn.Linear(3, 1), (4, 3)),
    LayerCase("conv1d", lambda: nn.Conv1d(2, 3, 3), (2, 2, 7)),
    LayerCase("conv1d-unbatched", lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 7)),
    LayerCase("conv1d-dilated-circular", lambda: nn.Conv1d(2, 2, 3, padding=2, dilation=2, padding_mode="circular"), (2, 2, 6)),
    LayerCase("conv2d", lambda: nn.Conv2d(2, 3, 3), (2, 2, 5, 4)),
    LayerCase("conv2d-unbatched", lambda: nn.Conv2d(2, 3, 2), (2, 4, 4)),
    LayerCase("conv2d-no-bias", lambda: nn.Conv2d(2, 3, 2, bias=False), (3, 2, 3, 3)),
    LayerCase("conv2d-1x1", lambda: nn.Conv2d(4, 3, 1), (1, 4, 2, 2)),
    LayerCase("conv2d-stride-padding", lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 2, 5, 4)),
    LayerCase("conv2d-same", lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=(1, 2)), (2, 2, 4, 5)),
    LayerCase("conv2d-same-even", lambda: nn.Conv2d(1, 2, (2, 4), padding="same"), (2, 1, 4, 4)),
    LayerCase("conv2d-valid", lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 2, 4, 4)),
    LayerCase("conv2d-groups", lambda: nn.Conv2d(4, 6, 2, groups=2), (2, 4, 3, 4)),
    LayerCase("conv2d-depthwise", lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1), (2, 3, 4, 3)),
    LayerCase("conv2d-reflect", lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 2, 4, 4)),
    LayerCase("conv2d-replicate", lambda: nn.Conv2d(2, 2, 3, padding=(2, 1), padding_mode="replicate"), (2, 2, 4, 4)),
    LayerCase("conv2d-circular-same", lambda: nn.Conv2d(2, 2, 2, padding="same", padding_mode="circular"), (2, 2, 4, 4)),
    LayerCase("conv3d", lambda: nn.Conv3d(2, 2, 2, padding=1, stride=(1, 2, 1)), (2, 2, 3, 3, 2)),
    LayerCase("conv3d-groups-unbatched", lambda: nn.Conv3d(2, 4, (1, 2, 2), groups=2), (2, 2, 3, 3)),
]  # fmt: skip

SOLVERS: list[Solver] = [Exact(), CG(1), CG(2), CG(3), CG(5), CG(3, per_output=False)]

SOLVER_SPACES: list[tuple[Solver, str]] = [
    (solver, space)
    for solver in SOLVERS
    for space in (SAMPLE, FEATURE, MATRIX_FREE)
    if space in solver.spaces
]

FEW = (Exact(), CG(2), CG(3, per_output=False))


def crossed(*values: object) -> object:
    """One place of a cross, slow unless its solver is one of a few: the others differ by their number of iterations."""
    return pytest.param(*values, marks=() if values[0] in FEW else pytest.mark.slow)


CROSSED_SOLVERS = [crossed(solver) for solver in SOLVERS]
CROSSED_SOLVER_SPACES = [crossed(solver, space) for solver, space in SOLVER_SPACES]

by_name = {"ids": lambda value: getattr(value, "name", None) or str(value)}


def design_matrix(layer: nn.Module, arguments: tuple[Tensor, ...], trained: list[str]) -> Tensor:
    """The matrix of `parameters -> output`, all trained parameters stacked, by unit vectors through torch's forward."""
    sizes = {name: parameter.shape for name, parameter in layer.named_parameters()}
    columns = []
    for name in trained:
        for index in range(sizes[name].numel()):
            units = {other: torch.zeros(shape, dtype=torch.float64) for other, shape in sizes.items()}
            units[name].view(-1)[index] = 1.0
            columns.append(torch.func.functional_call(layer, units, arguments).detach().flatten())
    return torch.stack(columns, dim=1)


Owners = Callable[[str, Tensor], Tensor]


def leading(name: str, parameter: Tensor) -> Tensor:
    """The output that each number of a parameter belongs to, where outputs come first."""
    return torch.arange(len(parameter)).repeat_interleave(parameter[0].numel())


def blocks(layer: nn.Module, trained: list[str], owners: Owners) -> list[Tensor]:
    """For every output, where its parameters stand in the stacked vector: each is a system of its own."""
    owner = torch.cat([owners(name, layer.get_parameter(name)) for name in trained])
    return [torch.nonzero(owner == output).flatten() for output in range(int(owner.max()) + 1)]


def textbook_cg(M: Tensor, b: Tensor, iterations: int) -> Tensor:
    """Conjugate gradients as in every textbook, on one vector, from zero."""
    x, r = torch.zeros_like(b), b.clone()
    p = r.clone()
    for _ in range(iterations):
        if r @ r == 0:
            break
        alpha = (r @ r) / (p @ M @ p)
        x = x + alpha * p
        smaller = r - alpha * (M @ p)
        p = smaller + (smaller @ smaller) / (r @ r) * p
        r = smaller
    return x


def oracle(
    layer: nn.Module,
    input: Tensor | tuple[Tensor, ...],
    G: Tensor,
    solver: Solver,
    tau_theta: float,
    scaling: str = "paper",
    owners: Owners = leading,
) -> dict[str, Tensor]:
    """The direction of every trained parameter of a plain layer, computed without the package."""
    return summed_oracle(layer, [(input, G)], solver, tau_theta, scaling, owners)


def summed_oracle(
    layer: nn.Module,
    calls: Sequence[tuple[Tensor | tuple[Tensor, ...], Tensor]],
    solver: Solver,
    tau_theta: float,
    scaling: str = "paper",
    owners: Owners = leading,
) -> dict[str, Tensor]:
    """The direction of all calls of a plain layer together, each an input and its G: their rows stand below one another."""
    trained = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    inputs = [input if isinstance(input, tuple) else (input,) for input, _ in calls]
    A = torch.cat([design_matrix(layer, arguments, trained) for arguments in inputs])
    G = torch.cat([G.flatten() for _, G in calls])
    outputs = blocks(layer, trained, owners)
    damping = 1 / tau_theta if scaling == "paper" else G.numel() / len(outputs) / tau_theta
    M = A.T @ A + damping * torch.eye(A.shape[1], dtype=A.dtype)
    b = A.T @ G
    if isinstance(solver, Exact):
        stacked = torch.linalg.solve(M, b)
    elif solver.per_output:
        stacked = torch.zeros_like(b)
        for block in outputs:
            stacked[block] = textbook_cg(M[block][:, block], b[block], solver.iterations)
    else:
        stacked = textbook_cg(M, b, solver.iterations)
    stacked = stacked * (damping if scaling == "gradient" else 1.0)
    parts = stacked.split([layer.get_parameter(name).numel() for name in trained])
    return {name: part.view_as(layer.get_parameter(name)) for name, part in zip(trained, parts, strict=True)}


def relative_error(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach(), expected.detach()
    size = expected.norm()
    return float((value - expected).norm() / (size if size > 0 else 1.0))


def assert_directions(layer: nn.Module, expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    for name, parameter in layer.named_parameters():
        if name in expected:
            assert parameter.grad is not None, name
            error = relative_error(parameter.grad, expected[name])
            assert error <= tolerance, f"{name}: relative error {error:.2e}"
        else:
            assert parameter.grad is None, name
