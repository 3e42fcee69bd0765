"""Models people really have, small but with their real topology: cases for conversion and training.

Everything takes a dict of arguments and gives a loss, so that one test serves them all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from cases import randn

CLASSES = 4


def labels(output: Tensor) -> Tensor:
    """A class for each example, or for each pixel of it."""
    batch, _, *positions = output.shape
    return torch.arange(output[:, 0].numel()).view(batch, *positions) % CLASSES


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.downsample(x)
        return self.relu(y)


class ResNet18(nn.Module):
    """The 18-layer topology at a small width."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            stage = nn.Sequential(Block(inputs, outputs, 1 if number == 1 else 2), Block(outputs, outputs, 1))
            self.add_module(f"layer{number}", stage)
        self.fc = nn.Linear(8 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class ViT(nn.Module):
    """A vision transformer: patches, a class token, positions, pre-norm blocks."""

    def __init__(self, width: int = 16, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class AttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class UNet(nn.Module):
    """Down twice, up twice by transposed convolutions, skip connections."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = self.two(1, width), self.two(width, 2 * width)
        self.bottom = self.two(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = self.two(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = self.two(2 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def two(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        x = self.up2(self.bottom(functional.max_pool2d(second, 2)))
        x = self.up1(self.merge2(torch.cat([second, x], dim=1)))
        return self.out(self.merge1(torch.cat([first, x], dim=1)))


class LSTMClassifier(nn.Module):
    def __init__(self, tokens: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.project_in = nn.Linear(width, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.hidden1 = nn.Linear(2 * width, width)
        self.hidden2 = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.project_in(self.embedding(x)).tanh())
        return self.head(self.hidden2(self.hidden1(states[:, -1]).relu()).relu())


class MixerBlock(nn.Module):
    """Mixes tokens through a transposed view, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 12), nn.GELU(), nn.Linear(12, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(MixerBlock(16, width), MixerBlock(16, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class GraphConv(nn.Module):
    """`P X W + b`: linear in its parameters, and no class of torch's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ x @ self.weight + self.bias


class GraphNetwork(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConv(5, width), GraphConv(width, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.conv1(x, adjacency).relu()
        return self.head(self.hidden(self.conv2(x, adjacency).relu()).relu())


def gpt2() -> nn.Module:
    import transformers  # here, because a machine with a GPU may not have it

    config = transformers.GPT2Config(
        vocab_size=17,
        n_positions=12,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it is logged that this is taken, which breaks a compiler's graph
    return model


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=12,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def photos(batch: int = 8) -> dict[str, Tensor]:
    return {"x": randn(batch, 3, 16, 16, seed=1)}


def scans(batch: int = 2) -> dict[str, Tensor]:
    return {"x": randn(batch, 1, 16, 16, seed=1)}


def sentences(batch: int = 4) -> dict[str, Tensor]:
    tokens = torch.randint(17, (batch, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def words(batch: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randint(11, (batch, 7), generator=torch.Generator().manual_seed(1))}


def graph(nodes: int = 12) -> dict[str, Tensor]:
    edges = (randn(nodes, nodes, seed=2) > 0.5).double()
    edges = edges + edges.T + torch.eye(nodes)
    return {"x": randn(nodes, 5, seed=1), "adjacency": edges / edges.sum(1, keepdim=True)}


@dataclass(frozen=True)
class ModelCase:
    """A model, its synthetic data, and what to look at.

    Attributes:
        name: how the table calls it.
        make: builds it with random weights.
        data: its arguments, the same every time, in float64; for another size of batch where one is named.
        layers: names of converted layers whose directions are compared with an independent computation.
        explicit: names of modules that must stay explicit, and words that `summary` must say of each.
        module_types: classes to convert, where the default ones are not enough.
        note: what the table should say of it.
    """

    name: str
    make: Callable[[], nn.Module]
    data: Callable[..., dict[str, Tensor]]
    layers: tuple[str, ...]
    explicit: dict[str, str]
    module_types: Sequence[type[nn.Module]] | None = None
    note: str = ""

    def model(self) -> nn.Module:
        """A fresh float64 model, the same every time."""
        torch.manual_seed(0)
        return self.make().double()

    def loss(self, model: Callable, data: dict[str, Tensor] | None = None) -> Tensor:
        """Cross-entropy: a language model's own, else against fixed labels."""
        output = model(**self.data() if data is None else data)
        if not isinstance(output, Tensor):
            return output.loss
        return functional.cross_entropy(output, labels(output).to(output.device))


LAST = "the last layer"

MODELS = [
    ModelCase(
        "ResNet-18",
        ResNet18,
        photos,
        ("conv1", "layer2.0.downsample.0", "layer3.1.conv2", "layer4.0.conv1"),
        {"fc": LAST, "bn1": "BatchNorm2d"},
    ),
    ModelCase(
        "ViT-tiny",
        ViT,
        photos,
        ("patches", "blocks.0.mlp.0", "blocks.1.mlp.2"),
        {"head": LAST, "norm": "LayerNorm"},
    ),
    ModelCase(
        "GPT-2 of `transformers`",
        gpt2,
        sentences,
        ("transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_proj"),
        {"lm_head": LAST, "transformer.wpe": "Embedding", "transformer.ln_f": "LayerNorm"},
    ),
    ModelCase(
        "Llama of `transformers`",
        llama,
        sentences,
        (
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.mlp.down_proj",
            "model.layers.1.self_attn.v_proj",
        ),
        {"lm_head": LAST, "model.embed_tokens": "Embedding", "model.norm": "not a class"},
    ),
    ModelCase(
        "U-Net",
        UNet,
        scans,
        ("down1.0", "up2", "bottom.0", "merge1.2", "up1"),
        {"out": LAST},
    ),
    ModelCase(
        "LSTM classifier",
        LSTMClassifier,
        words,
        ("project_in", "hidden1", "hidden2"),
        {"lstm": "recurrent", "head": LAST, "embedding": "Embedding"},
        note="the recurrent weights stay explicit, and `summary` says so",
    ),
    ModelCase(
        "MLP-Mixer",
        Mixer,
        photos,
        ("patches", "blocks.0.tokens.0", "blocks.1.channels.2"),
        {"head": LAST, "norm": "LayerNorm"},
    ),
    ModelCase(
        "Graph convolution",
        GraphNetwork,
        graph,
        ("conv1", "conv2", "hidden"),
        {"head": LAST},
        module_types=(GraphConv, nn.Linear),
        note="asked for with `module_types=[GraphConv, nn.Linear]`, solved matrix-free through autograd",
    ),
]
