"""Layers of every kind beyond linear layers and convolutions, and how the tests make and convert them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import proxprop
from cases import Owners, leading, randn
from proxprop.solvers import Solver


def second(groups: int) -> Owners:
    """A transposed convolution's weight is `[channels, outputs/groups, *kernel]`."""

    def owners(name: str, parameter: Tensor) -> Tensor:
        if name == "bias":
            return leading(name, parameter)
        channels, outputs = parameter.shape[:2]
        group = torch.arange(channels) // (channels // groups)
        owner = group[:, None] * outputs + torch.arange(outputs)
        return owner.repeat_interleave(parameter[0, 0].numel(), dim=1).flatten()

    return owners


def each(name: str, parameter: Tensor) -> Tensor:
    """Every number has an output of its own."""
    return torch.arange(parameter.numel())


def last(name: str, parameter: Tensor) -> Tensor:
    """A table's columns are the outputs."""
    return torch.arange(parameter.shape[-1]).repeat(parameter.numel() // parameter.shape[-1])


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    owners: Owners

    @property
    def kind(self) -> str:
        return type(self.make()).__name__


def x(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (randn(*shape, seed=1),)


def eval_mode(module: nn.Module) -> nn.Module:
    """Evaluation mode with running statistics that are not the default ones."""
    module.running_mean.uniform_(-1, 1)
    module.running_var.uniform_(0.5, 2)
    return module.eval()


INDEX = torch.tensor([[0, 2, 2], [4, 2, 0]])


OFFSETS = torch.tensor([0, 2, 2, 5])


CASES = [
    Case("transposed-1d", lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), x(2, 2, 4), second(1)),
    Case("transposed-2d-output-padding", lambda: nn.ConvTranspose2d(2, 3, (3, 2), stride=(1, 3), dilation=2, padding=(0, 1), output_padding=(1, 2)), x(2, 2, 3, 2), second(1)),
    Case("transposed-1d-one-position", lambda: nn.ConvTranspose1d(3, 9, 3, padding=3, groups=3, bias=False), x(1, 3, 5), second(3)),
    Case("transposed-1d-output-padding", lambda: nn.ConvTranspose1d(2, 3, 2, dilation=3, padding=1, output_padding=2), x(2, 2, 4), second(1)),
    Case("transposed-2d", lambda: nn.ConvTranspose2d(2, 3, (2, 3), stride=(1, 2), dilation=(2, 1)), x(2, 2, 3, 2), second(1)),
    Case("transposed-2d-groups", lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False), x(2, 4, 2, 3), second(2)),
    Case("transposed-2d-wide-padding", lambda: nn.ConvTranspose2d(1, 2, 2, padding=2), x(2, 1, 5, 5), second(1)),
    Case("transposed-2d-unbatched", lambda: nn.ConvTranspose2d(2, 2, 3, padding=1), x(2, 3, 3), second(1)),
    Case("transposed-3d", lambda: nn.ConvTranspose3d(1, 2, 2, stride=(2, 1, 1)), x(1, 1, 2, 2, 2), second(1)),
    Case("bilinear", lambda: nn.Bilinear(2, 3, 4), lambda: (randn(5, 2, seed=1), randn(5, 3, seed=2)), leading),
    Case("bilinear-no-bias", lambda: nn.Bilinear(2, 2, 3, bias=False), lambda: (randn(2, 3, 2, seed=1), randn(2, 3, 2, seed=2)), leading),
    Case("layer-norm", lambda: nn.LayerNorm(4), x(3, 2, 4), each),
    Case("layer-norm-two-axes", lambda: nn.LayerNorm((2, 3)), x(4, 2, 3), each),
    Case("layer-norm-no-bias", lambda: nn.LayerNorm(4, bias=False), x(5, 4), each),
    Case("layer-norm-one-sample", lambda: nn.LayerNorm(4), x(4), each),
    Case("rms-norm", lambda: nn.RMSNorm(4), x(3, 2, 4), each),
    Case("group-norm", lambda: nn.GroupNorm(2, 4), x(3, 4, 2, 2), each),
    Case("batch-norm-1d", lambda: nn.BatchNorm1d(3), x(5, 3), each),
    Case("batch-norm-1d-sequence", lambda: nn.BatchNorm1d(3, momentum=None), x(4, 3, 2), each),
    Case("batch-norm-2d", lambda: nn.BatchNorm2d(3, track_running_stats=False), x(2, 3, 2, 2), each),
    Case("batch-norm-2d-eval", lambda: eval_mode(nn.BatchNorm2d(3)), x(2, 3, 2, 2), each),
    Case("batch-norm-3d", lambda: nn.BatchNorm3d(2), x(2, 2, 2, 2, 1), each),
    Case("instance-norm-1d", lambda: nn.InstanceNorm1d(3, affine=True), x(2, 3, 4), each),
    Case("instance-norm-2d-unbatched", lambda: nn.InstanceNorm2d(2, affine=True), x(2, 3, 3), each),
    Case("instance-norm-2d-eval", lambda: eval_mode(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)), x(2, 2, 3, 3), each),
    Case("instance-norm-3d", lambda: nn.InstanceNorm3d(2, affine=True), x(2, 2, 2, 2, 2), each),
    Case("embedding-bag-mean", lambda: nn.EmbeddingBag(5, 3), lambda: (INDEX,), last),
    Case("embedding-bag-offsets", lambda: nn.EmbeddingBag(5, 3, mode="sum"), lambda: (INDEX.flatten(), OFFSETS), last),
    Case("embedding-bag-last-offset", lambda: nn.EmbeddingBag(5, 3, include_last_offset=True), lambda: (INDEX.flatten(), torch.tensor([0, 2, 6])), last),
    Case("embedding-bag-weights", lambda: nn.EmbeddingBag(5, 3, mode="sum"), lambda: (INDEX, None, randn(2, 3, seed=3)), last),
]  # fmt: skip


def fresh(case: Case) -> nn.Module:
    torch.manual_seed(0)
    module = case.make().double()
    for parameter in module.parameters():  # scales of 1 and shifts of 0 would hide mistakes
        torch.nn.init.normal_(parameter)
    return module


def converted(module: nn.Module, solver: Solver, **settings) -> nn.Module:
    return proxprop.convert(copy.deepcopy(module), solver, include_last=True, module_types="all", **settings)


def attention_inputs(inputs: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = randn(3, 4, 6, seed=1), randn(3, 5, 6, seed=2), randn(3, 5, 6, seed=3)
    return {
        "self": (q, q, q),
        "key is value": (q, k, k),
        "all different": (q, k, v),
        "unbatched": (q[0],) * 3,
        "other widths": (q, randn(3, 5, 5, seed=4), randn(3, 5, 3, seed=5)),
    }[inputs]


class Transposed(nn.Module):
    """A linear layer that stores its weight the other way round, as Hugging Face's Conv1D does."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs)),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, input: Tensor) -> Tensor:
        return torch.addmm(self.bias, input.view(-1, input.size(-1)), self.weight).view(*input.shape[:-1], -1)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.attention(input, input, input)[0]


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))


class Scale(nn.Module):
    """In no table, so solved matrix-free through autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight


class Calls(nn.Module):
    """A model whose first layer takes any arguments, and whose head is never called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 2)

    def forward(self, *arguments: Tensor):
        return self.inner(*arguments)
