"""A small byte-level GPT: AdamW and Muon alone, and both on directions from a running S.

    python examples/gpt.py --compile --json gpt.json                                       # the whole study, for a GPU
    python examples/gpt.py --steps 20 --layers 2 --width 96 --methods 2e-3 muon/2e-3:0.3   # a look, on a CPU

The text is the source code of the Python that runs this, so that nothing has to be downloaded; its size and hash are
recorded. Every method sees the same batches in the same order and starts from the same weights.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import proxprop

BYTES = 8_000_000
HELD_OUT = 400_000
RATES = {"adamw": (1e-3, 2e-3, 4e-3, 8e-3), "muon": (1e-3, 2e-3, 4e-3, 8e-3)}
DAMPING = 0.3
EVERY = 10


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, positions, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(-3, -2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(-3, -2).flatten(-2))


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
        return x + self.mlp(x)


class GPT(nn.Module):
    """Bytes to the scores of the byte that follows."""

    def __init__(self, layers: int, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                out = name.endswith(("out.weight", "mlp.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if out else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, positions], bytes."""
        embedded = self.bytes(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(embedded)))


@dataclass(frozen=True)
class Method:
    """An optimizer and its learning rate; the damping of a running S, or None for the optimizer alone.

    S is estimated from so many rows, or from all, and summed in the first of `update_every` steps.
    """

    lr: float
    damping: float | None = None
    rows: int | None = None
    update_every: int = 1
    optimizer: str = "adamw"

    @classmethod
    def parse(cls, written: str) -> "Method":
        """From `lr`, `lr:damping`, `lr:damping:rows` or `lr:damping:rows:update_every`; rows may be empty.

        `muon/` before it takes Muon for the hidden matrices.
        """
        optimizer, _, written = written.rpartition("/")
        lr, damping, rows, update_every, *_ = (*written.split(":"), "", "", "")
        return cls(
            float(lr),
            float(damping) if damping else None,
            int(rows) if rows else None,
            int(update_every) if update_every else 1,
            optimizer or "adamw",
        )


def text(device: torch.device) -> tuple[Tensor, Tensor, str]:
    """Bytes to train on, bytes held out, and a hash of all of them; files come in an order that mixes subjects."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    ranked = sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest())
    whole = b"".join(path.read_bytes() for path in ranked)[:BYTES]
    everything = torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device)
    return everything[HELD_OUT:], everything[:HELD_OUT], hashlib.sha256(whole).hexdigest()[:12]


def batch(data: Tensor, samples: int, positions: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the byte after each of theirs."""
    start = torch.randint(len(data) - positions, (samples, 1), generator=generator).to(data.device)
    window = data[start + torch.arange(positions + 1, device=data.device)].long()
    return window[:, :-1], window[:, 1:]


def train(method: Method, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Train once and return what was measured."""
    device = torch.device(options.device)
    data, held_out, digest = text(device)
    torch.manual_seed(seed)
    model = GPT(options.layers, options.width, options.heads, options.positions).to(device)
    optimizers = make_optimizers(model, method)
    if method.damping is not None:
        proxprop.convert(model, proxprop.Exact())
        running = proxprop.Running(
            decay=0.95,
            update_every=method.update_every,
            invert_every=10,
            damping=method.damping,
            rows=method.rows,
        )
        proxprop.attach(optimizers, model, running=running)
    if options.compile:
        torch.compiler.reset()  # what was compiled for another method would count as a recompilation
        model.compile()
    generator = torch.Generator().manual_seed(seed)
    losses, began = [], time.perf_counter()
    for step in range(options.steps):
        if step == min(20, options.steps // 2):  # the clock starts when everything is warm
            began = _now(device)
            timed = options.steps - step
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = method.lr * schedule(step, options.steps)
        loss = loss_of(model, *batch(data, options.samples, options.positions, generator), device)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    seconds = (_now(device) - began) / timed
    return asdict(method) | {
        "seed": seed,
        "train_loss": float(torch.stack(losses[-50:]).mean()),
        "validation_loss": validation(model, held_out, options, device),
        "seconds_per_step": seconds,
        "text": digest,
    }


def make_optimizers(model: nn.Module, method: Method) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices of the blocks and AdamW for the rest; Muon's steps are scaled to AdamW's."""
    muon = method.optimizer == "muon"
    matrices = [
        p for name, p in model.named_parameters() if muon and p.ndim == 2 and name.startswith("blocks")
    ]
    taken = set(matrices)
    rest = [p for p in model.parameters() if p not in taken]
    fused = rest[0].is_cuda or None
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=method.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    ]
    if matrices:
        found.append(
            torch.optim.Muon(matrices, lr=method.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        )
    return found


def loss_of(model: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> Tensor:
    """Mean loss in nats a byte, in bfloat16 on a GPU."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        scores = model(x)
    return cross_entropy(scores.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def validation(model: nn.Module, data: Tensor, options: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over windows of the held-out text, the same for every run."""
    generator = torch.Generator().manual_seed(1234)
    batches = [batch(data, options.samples, options.positions, generator) for _ in range(options.batches)]
    return float(torch.stack([loss_of(model, x, y, device) for x, y in batches]).mean())


def schedule(step: int, steps: int) -> float:
    """Up in a twelfth of the steps, down to a tenth along a cosine."""
    warming = max(steps // 12, 1)
    if step < warming:
        return (step + 1) / warming
    return 0.55 + 0.45 * math.cos(math.pi * (step - warming) / max(steps - warming, 1))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Run the study and print a line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("steps", 1200), ("layers", 6), ("width", 384), ("heads", 6), ("positions", 256),
                        ("samples", 64), ("batches", 20)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    study = [
        Method(lr, damping, None, EVERY if damping else 1, optimizer)
        for optimizer, rates in RATES.items()
        for damping in (None, DAMPING)
        for lr in rates
    ]
    parser.add_argument(
        "--methods",
        type=Method.parse,
        nargs="+",
        default=study,
        metavar="[muon/]LR[:DAMPING[:ROWS[:UPDATE_EVERY]]]",
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the model; S then takes all rows"
    )
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    options = parser.parse_args()
    if options.width % options.heads:
        parser.error(f"--width should be a multiple of --heads ({options.heads}) but is {options.width}")
    record = {"command": " ".join(sys.argv).split(" --json")[0], "environment": environment(options.device)}
    rows: list[dict[str, object]] = []
    for seed in options.seeds:
        for method in options.methods:
            rows.append(train(method, seed, options))
            print({k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
            if options.json:
                options.json.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


def environment(device: str) -> dict[str, str]:
    """Where the numbers come from; COMMIT says what a copy without a repository can't."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"torch": torch.__version__, "device": name, "commit": os.environ.get("COMMIT", "")}


if __name__ == "__main__":
    main()
