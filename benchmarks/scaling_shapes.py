"""Real models as tables of shapes: what their converted layers are, and how much of them stays explicit."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layers:
    """`count` alike layers.

    Attributes:
        features: inputs of one output, with the bias where there is one; those of one block where there are blocks.
        outputs: output channels.
        positions: samples that one item of the batch brings.
        count: how many such layers.
        offsets: for a convolution with stride 1, its kernel's positions; S then comes from autocorrelations.
        shared: how many of them see the same input, so that S is formed once.
        blocks: how many blocks of features S has on its diagonal.
    """

    features: int
    outputs: int
    positions: int
    count: int = 1
    offsets: int = 1
    shared: int = 1
    blocks: int = 1

    @property
    def inputs(self) -> int:
        """All features."""
        return self.blocks * self.features

    @property
    def numbers(self) -> int:
        """Of S."""
        return self.blocks * self.features**2

    @property
    def seen(self) -> int:
        """Different inputs."""
        return self.count // self.shared


@dataclass(frozen=True)
class Model:
    """A model and the batch that one GPU takes a step on.

    Attributes:
        layers: those that ProxProp converts.
        explicit: parameters that keep BackProp's gradient (embeddings, norms, the last layer).
        last: `positions·features·outputs` of the last layer, for its FLOPs.
        items: images or sequences a GPU.
        like: the measured network that its BackProp speed is taken from.
        precision: of BackProp's products; S and its solve are in TF32 or float32.
    """

    name: str
    layers: tuple[Layers, ...]
    explicit: int
    last: int
    items: int
    like: str
    precision: str

    @property
    def parameters(self) -> int:
        return self.explicit + sum(layer.count * layer.inputs * layer.outputs for layer in self.layers)


def _bottlenecks(inputs: int, width: int, before: int, after: int, count: int) -> list[Layers]:
    """A stage of ResNet-50: `before` and `after` are the feature map's positions around its strided layers."""
    outputs = 4 * width
    return [
        Layers(inputs, width, before),
        Layers(outputs, width, after, count - 1),
        Layers(9 * width, width, after, 1, 9 if before == after else 1),
        Layers(9 * width, width, after, count - 1, 9),
        Layers(width, outputs, after, count),
        Layers(inputs, outputs, after),
    ]


RESNET50 = Model(
    "ResNet-50, 128 images of 224² a GPU",
    (
        Layers(3 * 49, 64, 112**2),
        *_bottlenecks(64, 64, 56**2, 56**2, 3),
        *_bottlenecks(256, 128, 56**2, 28**2, 4),
        *_bottlenecks(512, 256, 28**2, 14**2, 6),
        *_bottlenecks(1024, 512, 14**2, 7**2, 3),
    ),
    explicit=2049 * 1000 + 53120,
    last=2049 * 1000,
    items=128,
    like="resnet18-128",
    precision="tf32",
)

GPT2_MEDIUM = Model(
    "GPT-2 medium, 8 sequences of 1,024 a GPU",
    (
        Layers(1025, 3072, 1024, 24),
        Layers(1025, 1024, 1024, 24),
        Layers(1025, 4096, 1024, 24),
        Layers(4097, 1024, 1024, 24),
    ),
    explicit=(50257 + 1024) * 1024,
    last=1024 * 1024 * 50257,
    items=8,
    like="gpt2-block-8x1024",
    precision="tf32",
)

LLAMA_7B = Model(
    "Llama-7B shapes, 4 sequences of 2,048 a GPU",
    (
        Layers(4096, 4096, 2048, 3 * 32, shared=3),
        Layers(4096, 4096, 2048, 32),
        Layers(4096, 11008, 2048, 2 * 32, shared=2),
        Layers(11008, 4096, 2048, 32),
    ),
    explicit=2 * 32000 * 4096,
    last=2048 * 4096 * 32000,
    items=4,
    like="gpt2-block-8x1024",
    precision="bf16",
)

LLAMA_70B = Model(
    "Llama-70B shapes, 2 sequences of 4,096 a GPU, blocks of at most 8,192 features",
    (
        Layers(8192, 8192, 4096, 80),
        Layers(8192, 8192, 4096, 80),
        Layers(8192, 1024, 4096, 2 * 80, shared=2),
        Layers(8192, 28672, 4096, 2 * 80, shared=2),
        Layers(7168, 8192, 4096, 80, blocks=4),
    ),
    explicit=2 * 32000 * 8192,
    last=4096 * 8192 * 32000,
    items=2,
    like="gpt2-block-8x1024",
    precision="bf16",
)

MEASURED = (
    Model(
        "mlp-500",
        (Layers(3073, 4000, 1), Layers(4001, 1000, 1), Layers(1001, 4000, 1)),
        explicit=40010,
        last=40010,
        items=500,
        like="mlp-500",
        precision="tf32",
    ),
    Model(
        "resnet18-128",
        (
            Layers(27, 64, 32**2, 1, 9),
            Layers(576, 64, 32**2, 4, 9),
            Layers(576, 128, 16**2),
            Layers(1152, 128, 16**2, 3, 9),
            Layers(64, 128, 16**2),
            Layers(1152, 256, 8**2),
            Layers(2304, 256, 8**2, 3, 9),
            Layers(128, 256, 8**2),
            Layers(2304, 512, 4**2),
            Layers(4608, 512, 4**2, 3, 9),
            Layers(256, 512, 4**2),
        ),
        explicit=513 * 10 + 9600,
        last=5130,
        items=128,
        like="resnet18-128",
        precision="tf32",
    ),
    Model(
        "gpt2-block-8x1024",
        (Layers(769, 2304, 1024), Layers(769, 768, 1024), Layers(769, 3072, 1024), Layers(3073, 768, 1024)),
        explicit=769 * 128 + 4 * 768,
        last=1024 * 769 * 128,
        items=8,
        like="gpt2-block-8x1024",
        precision="tf32",
    ),
)
"""The networks whose steps `benchmarks/pieces.py` times."""

GPT2_SMALL = Model(
    "gpt",
    tuple(replace(layer, count=12) for layer in MEASURED[-1].layers),
    explicit=0,
    last=1024 * 768 * 8192,
    items=8,
    like="gpt",
    precision="bf16",
)
"""The network whose running averages `benchmarks/deferred.py` times."""

MODELS = (RESNET50, GPT2_MEDIUM, LLAMA_7B, LLAMA_70B)
