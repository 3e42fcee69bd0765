"""What a model is exported as, in a form that can be compared."""

from collections import Counter
from pathlib import Path

import onnx
import torch
from torch import nn

from training import images


def operators(program: torch.export.ExportedProgram) -> Counter:
    """What an exported graph computes; handing a value on (`detach`) computes nothing."""
    nodes = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return Counter(name for name in nodes if not name.startswith("aten.detach"))


def write(model: nn.Module, path: Path) -> onnx.ModelProto:
    torch.onnx.export(model, (images(dtype=torch.float32),), path, dynamo=True, verbose=False)
    loaded = onnx.load(path)
    onnx.checker.check_model(loaded)
    return loaded
