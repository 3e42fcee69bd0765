"""A converted model exports as the plain one: its forward is plain torch."""

from pathlib import Path

import onnx
import onnx.reference
import pytest
import torch

from cases import relative_error
from exporting import operators, write
from proxprop import CG, Exact
from quiet import quiet_exporter
from training import images, plain_model, small_model

works = pytest.mark.compatibility


@works("`torch.export`")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
def test_export_is_the_plain_models(solver, gradients: bool, training: bool) -> None:
    model, plain = (each.train(training) for each in (small_model(solver), plain_model()))
    with torch.set_grad_enabled(gradients):
        exported, expected = (torch.export.export(each, (images(),)) for each in (model, plain))
    assert operators(exported) == operators(expected)
    assert list(exported.state_dict) == list(expected.state_dict)
    with torch.no_grad():
        assert torch.equal(exported.module()(images()), plain(images()))


@works("`torch.export`")
def test_export_with_a_batch_of_any_size() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(small_model(), (images(),), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        assert torch.equal(exported.module()(images(9)), plain_model()(images(9)))


@works("ONNX export")
@quiet_exporter
@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
def test_onnx_is_the_plain_models(solver, tmp_path: Path) -> None:
    model, plain = small_model(solver, torch.float32).eval(), plain_model(torch.float32).eval()
    files = [write(each, tmp_path / f"{name}.onnx") for name, each in [("model", model), ("plain", plain)]]
    assert [node.op_type for node in files[0].graph.node] == [node.op_type for node in files[1].graph.node]
    input = images(dtype=torch.float32)
    name = files[0].graph.input[0].name
    (found,) = onnx.reference.ReferenceEvaluator(files[0]).run(None, {name: input.numpy()})
    assert relative_error(torch.from_numpy(found), plain(input).detach()) < 1e-5
