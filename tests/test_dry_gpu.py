"""The code that is meant for a GPU, run on one that computes nothing: see `dry_gpu`.

What these tests hold: operands are on one device and of precisions that go together, nothing waits for the GPU, and no
step launches more than it did.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional

import proxprop
from dry_gpu import GPU, Work, autocast, dry_gpu, without_a_gpu
from proxprop import CG, Exact, Running, Solver, device, replay, tuning
from proxprop.replay import Replay, Replays

pytest.importorskip("triton")
from proxprop.kernels import rotation

pytestmark = without_a_gpu

SOLVERS = [CG(1), CG(3), Exact()]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """What a GPU is asked, solves not being replayed."""
    monkeypatch.setattr(replay, "_switched_on", False)
    with dry_gpu() as work:
        yield work


def on_gpu(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device(GPU):
        return make()


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, device=GPU)


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, device=GPU, dtype=torch.long)


def test_what_a_gpu_or_its_host_would_suffer_from_is_noticed(work: Work) -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        empty(2) + torch.zeros(2)
    with pytest.raises(DataDependentOutputException):
        empty(2).sum().item()
    with pytest.raises(AssertionError, match="65536"):
        rotation.rotate(empty(2**16, 2, 2))
    assert not work.crossings
    empty(2).cpu()
    assert work.crossings == ["_to_copy"]


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(300, 200), lambda: empty(128, 300)),
    "linear, many samples": (lambda: nn.Linear(30, 200), lambda: empty(512, 30)),
    "linear, one sample": (lambda: nn.Linear(30, 20), lambda: empty(1, 30)),
    "linear, many outputs": (lambda: nn.Linear(256, 5003, bias=False), lambda: empty(1024, 256)),
    "linear, terms": (lambda: nn.Linear(1024, 1024), lambda: empty(1024, 1024)),
    "linear, terms of S": (lambda: nn.Linear(1024, 1024), lambda: empty(8192, 1024)),
    "linear, sequences": (lambda: nn.Linear(64, 96), lambda: empty(8, 16, 64)),
    "linear, 1500 samples": (lambda: nn.Linear(6000, 64), lambda: empty(1500, 6000)),
    "convolution, image rows": (lambda: nn.Conv2d(3, 32, 5, padding=2), lambda: empty(16, 3, 32, 32)),
    "convolution, autocorrelation": (lambda: nn.Conv2d(64, 64, 3, padding=1), lambda: empty(32, 64, 32, 32)),
    "convolution, patches": (lambda: nn.Conv2d(64, 96, 3, stride=2), lambda: empty(16, 64, 33, 33)),
    "convolution, few positions": (lambda: nn.Conv2d(64, 96, 3, padding=1), lambda: empty(2, 64, 4, 4)),
    "convolution, one tap": (lambda: nn.Conv2d(64, 96, 1), lambda: empty(8, 64, 7, 7)),
    "convolution, groups": (lambda: nn.Conv2d(32, 64, 3, padding=1, groups=4), lambda: empty(8, 32, 14, 14)),
    "convolution, reflected": (lambda: nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect"), lambda: empty(4, 8, 9, 9)),
    "convolution, 1d": (lambda: nn.Conv1d(16, 32, 5, padding=2), lambda: empty(8, 16, 64)),
    "convolution, 3d": (lambda: nn.Conv3d(8, 16, 3, padding=1), lambda: empty(2, 8, 8, 8, 8)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), lambda: empty(8, 32, 8, 8)),
    "attention": (lambda: nn.MultiheadAttention(64, 4, batch_first=True), lambda: empty(8, 16, 64)),
    "embedding": (lambda: nn.Embedding(1000, 64), lambda: indices(8, 16)),
    "bags": (lambda: nn.EmbeddingBag(1000, 64), lambda: indices(8, 16)),
    "layer norm": (lambda: nn.LayerNorm(64), lambda: empty(8, 16, 64)),
    "layer norm, many channels": (lambda: nn.LayerNorm((300, 300)), lambda: empty(2, 300, 300)),
    "batch norm": (lambda: nn.BatchNorm2d(32), lambda: empty(8, 32, 9, 9)),
}  # fmt: skip
"""Layers for every way that a GPU goes."""


def convert(name: str, solver: Solver) -> tuple[nn.Module, Tensor]:
    make, input = LAYERS[name]
    return proxprop.convert(on_gpu(make), solver, include_last=True, module_types="all"), input()


def forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, x, x)[0] if isinstance(model, nn.MultiheadAttention) else model(x)


WAYS: dict[str, Callable[[], AbstractContextManager]] = {
    "float32": nullcontext,
    "autocast": autocast,
    "captured": device.as_if_captured,
}


LAUNCHES = {
    "linear": (9, 13, 14),
    "linear, many samples": (11, 15, 12),
    "linear, one sample": (8, 12, 9),
    "linear, terms": (11, 15, 46),
    "linear, terms of S": (49, 53, 82),
    "linear, 1500 samples": (46, 139, 35),
    "convolution, image rows": (23, 27, 26),
    "convolution, autocorrelation": (32, 59, 74),
    "convolution, patches": (32, 31, 46),
    "convolution, few positions": (12, 16, 14),
    "convolution, groups": (35, 61, 60),
    "transposed convolution": (34, 115, 45),
    "attention": (34, 42, 40),
    "embedding": (11, 11, 11),
    "layer norm": (35, 22, 19),
}
"""Operations and kernels in the backward pass of one layer, with CG(1), CG(3) and Exact()."""

MORE = 1
"""How many more are no failure."""


BY_WAY = {
    "float32": [name for name in LAYERS if name not in LAUNCHES],  # whose launches are counted below
    "autocast": [*LAYERS],
    "captured": [*(name for name in LAYERS if "linear" in name), "convolution, image rows", "attention"],
}


@pytest.mark.parametrize(("way", "name"), [(way, name) for way in WAYS for name in BY_WAY[way]])
def test_a_layer_waits_for_nothing(way: str, name: str, work: Work) -> None:
    for solver in (Exact(),) if way == "autocast" else (CG(3), Exact()):
        model, x = convert(name, solver)
        for _ in range(2):  # the first one copies constants to the GPU
            work.clear()
            with WAYS[way]():
                y = forward(model, x)
                y.backward(torch.empty_like(y))
        check_gradients(model, work)


def check_gradients(model: nn.Module, work: Work) -> None:
    assert work.count
    assert not work.crossings
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_launches_no_more_than_it_did(name: str, work: Work) -> None:
    found = []
    for solver in SOLVERS:
        model, x = convert(name, solver)
        for _ in range(2):
            y = forward(model, x)
            G = torch.empty_like(y)
            model.zero_grad()
            work.clear()
            y.backward(G)
        found.append(work.count)
        check_gradients(model, work)
    assert all(count <= most + MORE for count, most in zip(found, LAUNCHES[name], strict=True)), found


def captured(solve: replay.Solve, tensors: Sequence[Tensor]) -> Replay:
    """Stands for a capture: a run of it is one launch, which is not counted."""
    held = [torch.empty_like(tensor) for tensor in tensors]
    return Replay(lambda: None, held, solve(held))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """What a GPU is asked, solves being replayed from the first step on."""
    monkeypatch.setattr(tuning, "REPLAYED_AFTER", 0)
    replays = Replays(captured, lambda: None)
    monkeypatch.setattr(replay, "_replays", lambda on: replays)
    with dry_gpu() as work:
        yield work


@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=repr)
def test_a_replayed_solve_copies_in_and_out(solver: Solver, replayed: Work) -> None:
    for name in ("linear", "linear, many samples", "convolution, image rows", "transposed convolution"):
        model, x = convert(name, solver)
        for _ in range(3):
            model.zero_grad()
            y = forward(model, x)
            G = torch.empty_like(y)
            replayed.clear()
            y.backward(G)
        assert not replayed.crossings
        assert 0 < replayed.count <= 4


class Net(nn.Module):
    """A transformer block behind an embedding, and a convolution behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(64, 300), nn.Linear(300, 64)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.head = nn.Linear(64, 100, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.table(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.narrow(functional.gelu(self.wide(x)))
        return self.head(x + self.conv(x[:, None]).mean(1))


class Mlp(nn.Module):
    """Layers of which four are alike."""

    def __init__(self) -> None:
        super().__init__()
        inner = [part for _ in range(4) for part in (nn.Linear(500, 500), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), *inner, nn.Linear(500, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(50, 50), nn.Linear(50, 50), nn.Linear(50, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


MODELS = {
    Net: lambda: indices(8, 16),
    Mlp: lambda: empty(256, 784),
    Tied: lambda: empty(128, 50),
}
EVERY = {"update_every": 2, "invert_every": 2}
ATTACHED = {
    "without averages": None,
    "averages": Running(**EVERY),
    "turns": Running(update_every=1, invert_every=2),
    "own damping": Running(damping=None, **EVERY),
    "rows": Running(rows=50, **EVERY),
    "root": Running(power=0.5, **EVERY),
    "bfloat16": Running(inverse_dtype=torch.bfloat16, **EVERY),
}


def step(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, parts: int = 1, set_to_none: bool = True
) -> None:
    for part in x.chunk(parts):
        y = model(part)
        y.backward(torch.empty_like(y))
    optimizer.step()
    optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize(
    ("kind", "attached", "way"),
    [
        *((Net, attached, "float32") for attached in ATTACHED),
        *(
            (kind, attached, "float32")
            for kind in (Mlp, Tied)
            for attached in ("without averages", "averages")
        ),
        *((Net, attached, "autocast") for attached in ("without averages", "bfloat16")),
        *((Net, attached, "captured") for attached in ("without averages", "averages", "root", "rows")),
    ],
)
def test_a_deferred_step_waits_for_nothing(kind, attached: str, way: str, work: Work) -> None:
    model, x = proxprop.convert(on_gpu(kind), Exact(), module_types="all"), MODELS[kind]()
    optimizer = torch.optim.AdamW(model.parameters())
    proxprop.attach(optimizer, model, running=ATTACHED[attached])
    with WAYS[way]():
        if (attached, way) == ("rows", "captured"):
            with pytest.raises(RuntimeError, match="draws other rows in each step"):
                step(model, x, optimizer)
            return
        step(model, x, optimizer)
        for parts in (1, 2):
            work.clear()
            step(model, x, optimizer, parts, set_to_none=False)
            assert work.count
            assert not work.crossings


SELDOM = Running(damping=None, update_every=2, invert_every=4)
STEPS = {
    (None, CG(3)): (555, 545, 545),
    (None, Exact()): (154, 144, 144),
    (SELDOM, CG(3)): (158, 60, 99),
    (SELDOM, Exact()): (163, 11, 50),
}
"""Operations of three steps of `Mlp` beyond those without proxprop. The first makes room for operators. The second
rests; the third is observed."""


@pytest.mark.parametrize(("running", "solver"), STEPS, ids=str)
def test_a_deferred_step_launches_no_more_than_it_did(running, solver: Solver, work: Work) -> None:
    found = []
    for converted in (False, True):
        model, x = on_gpu(Mlp), empty(256, 784)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if converted:
            proxprop.attach(optimizer, proxprop.convert(model, solver), running=running)
        for _ in range(3):
            work.clear()
            step(model, x, optimizer)
            found.append(work.count)
    extra = [with_proxprop - plain for plain, with_proxprop in zip(found[:3], found[3:], strict=True)]
    assert all(count <= most + MORE for count, most in zip(extra, STEPS[running, solver], strict=True)), extra


def test_a_replayed_system_is_copied_once(replayed: Work) -> None:
    model, x = proxprop.convert(on_gpu(Mlp), CG(3)), empty(256, 784)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model, running=SELDOM)
    for _ in range(4):  # the last one rests
        replayed.clear()
        step(model, x, optimizer)
    solved = 5
    assert replayed.operations["_foreach_copy_"] == 2 * solved  # in and out
    assert replayed.operations["clone"] == 3 * solved  # the solution, its bias and the flag
    assert not replayed.launches


@pytest.mark.parametrize(
    ("matrices", "turns"),
    [(1, [0, 1, 2, 3, 1]), (2, [0, 1, 1, 2, 2]), (3, [0, 1, 1, 2, 2]), (4, [1, 0, 0, 0, 0])],
)
def test_alike_layers_share_a_turn(
    matrices: int, turns: list[int], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "INVERTED_TOGETHER_MOST_BYTES", matrices * 501**2 * 4)
    model = proxprop.convert(on_gpu(Mlp), Exact())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = proxprop.attach(optimizer, model, running=Running(update_every=1, invert_every=4))
    assert [cluster.turn for cluster in attached.clusters] == turns
    for _ in range(5):
        step(model, empty(256, 784), optimizer)
    assert not work.crossings
