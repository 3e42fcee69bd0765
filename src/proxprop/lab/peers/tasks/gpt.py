"""A byte-level GPT on the source code of the Python that runs it, as in `examples/gpt.py`."""

import hashlib
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from proxprop.lab.devices import autocast
from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task

BYTES, HELD_OUT = 8_000_000, 400_000


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, positions, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(-3, -2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return found


class Block(nn.Module):
    """Attention and an MLP, each with a normalisation before and the identity around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, positions, width]."""
        x = x + self.attention(x)
        found: Tensor = x + self.mlp(x)
        return found


class GPT(nn.Module):
    """Bytes, or other tokens, to the scores of the one that follows."""

    def __init__(self, layers: int, width: int, heads: int, positions: int, tokens: int = 256) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                out = name.endswith(("out.weight", "mlp.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, positions], whole numbers below `tokens`."""
        embedded = self.bytes(x) + self.positions.weight[: x.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(embedded)))
        return scores


def make(
    name: str,
    size: Size,
    layers: int,
    width: int,
    positions: int,
    samples: int,
    steps: int,
    precision: str = "fp32",
) -> Task:
    """The task for so many windows of so many bytes a step."""

    def problem(device: torch.device) -> Problem:
        whole = torch.frombuffer(bytearray(source()), dtype=torch.uint8).to(device)
        train, held = whole[HELD_OUT:], whole[:HELD_OUT]

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            with autocast(device, precision):
                scores = model(batch[0])
            return cross_entropy(scores.float().flatten(0, 1), batch[1].flatten())

        def probes(data: Tensor, seed: int) -> list[Batch]:
            generator = torch.Generator(device).manual_seed(seed)
            return [windows(data, samples, positions, generator) for _ in range(16)]

        unseen, seen = probes(held, 1), probes(train, 2)[:8]

        def measure(model: nn.Module) -> Measured:
            means = [float(torch.stack([loss(model, b) for b in part]).mean()) for part in (unseen, seen)]
            return {"score": means[0], "train_loss": means[1]}

        def model() -> nn.Module:
            return GPT(layers, width, heads=max(width // 64, 1), positions=positions)

        return Problem(model, lambda g: windows(train, samples, positions, g), loss, measure)

    about = (
        f"bytes of Python's own standard library; GPT of {layers} layers, {width} wide; {samples} windows of "
        f"{positions} bytes a step; nats a byte"
    )
    return Task(
        name, about, size, "held-out loss", steps, problem, clip=1.0, precision=precision, sequences=True
    )


def source() -> bytes:
    """The standard library's Python files, in an order that mixes subjects."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    ranked = sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest())
    return b"".join(path.read_bytes() for path in ranked)[:BYTES]


def windows(data: Tensor, samples: int, positions: int, generator: torch.Generator) -> Batch:
    """Random windows of the text [samples, positions], and the byte after each of theirs."""
    start = torch.randint(len(data) - positions, (samples, 1), generator=generator, device=data.device)
    window = data[start + torch.arange(positions + 1, device=data.device)].long()
    return window[:, :-1], window[:, 1:]


TASKS = (
    make("gpt", "gpu", layers=6, width=384, positions=256, samples=64, steps=1200, precision="bf16"),
    make("gpt-small", "cpu", layers=2, width=48, positions=32, samples=12, steps=400),
)
