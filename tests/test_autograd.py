"""Ways of asking autograd: checkpointing, in-place, `torch.autograd.grad`, `torch.func`."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import proxprop
from cases import oracle, randn, relative_error
from proxprop import CG, Exact
from training import assert_same, directions, images, loss_of, plain_model, small_model

SOLVERS = pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
works = pytest.mark.compatibility


@works("Activation checkpointing, reentrant and not")
@pytest.mark.parametrize("use_reentrant", [True, False])
@SOLVERS
def test_activation_checkpointing(solver, use_reentrant: bool) -> None:
    model, input = small_model(solver), images().requires_grad_()
    expected = directions(model, input)
    found = directions(model, input, lambda x: checkpoint(model, x, use_reentrant=use_reentrant))
    assert_same(found, expected)


@works("Activation checkpointing, reentrant and not")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_in_a_row_with_a_generic_layer(use_reentrant: bool) -> None:
    model = plain_model()
    model.insert(2, nn.GroupNorm(1, 3).double())
    proxprop.convert(model, CG(2), module_types=[nn.GroupNorm, nn.Linear])
    input = images().requires_grad_()
    expected = directions(model, input)
    found = directions(
        model, input, lambda x: checkpoint_sequential(model, 3, x, use_reentrant=use_reentrant)
    )
    assert_same(found, expected)


@works("In-place activations after the layer")
@pytest.mark.parametrize(
    "activate", [nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), lambda x: x.mul_(2).add_(1)]
)
@SOLVERS
def test_in_place_after_the_layer(solver, activate) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 4).double()
    layer = proxprop.convert(copy.deepcopy(plain), solver, include_last=True)
    input, C = randn(6, 5, seed=5), randn(6, 4, seed=6)
    (C * activate(layer(input))).sum().backward()
    leaf = plain(input).detach().requires_grad_()
    (C * activate(leaf.clone())).sum().backward()
    for name, expected in oracle(plain, input, leaf.grad, solver, 1.0).items():
        assert relative_error(layer.get_parameter(name).grad, expected) < 1e-9


@works("`torch.autograd.grad`")
@SOLVERS
def test_autograd_grad_returns_directions_and_leaves_grad_alone(solver) -> None:
    model, input = small_model(solver), images().requires_grad_()
    expected = directions(model, input)
    model.zero_grad()
    found = torch.autograd.grad(loss_of(model, input), list(model.parameters()))
    assert_same(dict(zip(expected, found, strict=True)), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@works("`torch.autograd.grad`")
def test_the_inputs_gradient_alone_is_torchs() -> None:
    model, plain, input = small_model(), plain_model(), images().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(model, input), input)
    (expected,) = torch.autograd.grad(loss_of(plain, input), input)
    assert torch.equal(found, expected)


@works("`torch.autograd.grad`")
@SOLVERS
def test_one_parameter_alone_gets_what_backward_would_give_it(solver) -> None:
    """The system is that of all trained parameters, whichever of them is asked for."""
    model, input = small_model(solver), images()
    expected = directions(model, input)
    for name, parameter in model.named_parameters():
        (found,) = torch.autograd.grad(loss_of(model, input), parameter)
        assert relative_error(found, expected[name]) < 1e-12


@works("`torch.autograd.grad`, several output gradients at once (`is_grads_batched`)")
@SOLVERS
def test_batched_output_gradients_equal_a_loop(solver) -> None:
    model, G = small_model(solver), randn(4, 6, 3, seed=3)
    output, parameters = model(images()), list(model.parameters())
    ask = {"outputs": output, "inputs": parameters, "retain_graph": True}
    batched = torch.autograd.grad(**ask, grad_outputs=G, is_grads_batched=True)
    loop = [torch.autograd.grad(**ask, grad_outputs=one) for one in G]
    for found, *expected in zip(batched, *loop, strict=True):
        assert relative_error(found, torch.stack(expected)) < 1e-12


def test_batched_output_gradients_of_a_wide_layer() -> None:
    layer, G = proxprop.nn.Linear(5, 40, solver=CG(3), dtype=torch.float64), randn(2, 4, 40, seed=3)
    output = layer(randn(4, 5, seed=4))
    ask = {"outputs": output, "inputs": layer.weight, "retain_graph": True}
    (batched,) = torch.autograd.grad(**ask, grad_outputs=G, is_grads_batched=True)
    for found, one in zip(batched, G, strict=True):
        assert relative_error(found, *torch.autograd.grad(**ask, grad_outputs=one)) < 1e-12


@works("`retain_graph`")
@SOLVERS
def test_retained_graph_gives_the_same_direction_again(solver) -> None:
    model = small_model(solver)
    loss = loss_of(model, images())
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, {n: 2 * v for n, v in once.items()})
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@works("Tensor and module hooks")
def test_hooks_see_directions_and_output_gradients() -> None:
    model, input = small_model(), images()
    expected = directions(model, input)
    seen: list[Tensor] = []
    handles = [
        model[3].weight.register_hook(seen.append),
        model[3].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
        model[3].register_full_backward_hook(lambda _, __, G: seen.append(G[0])),
    ]
    assert_same(directions(model, input), expected)
    G, on_tensor, accumulated = sorted(seen, key=lambda value: value.shape != (6, 8))
    assert torch.equal(on_tensor, expected["3.weight"])
    assert torch.equal(accumulated, expected["3.weight"])
    assert G.shape == (6, 8)
    for handle in handles:
        handle.remove()


REVERT = "a direction is not the derivative of anything; `proxprop.revert(model)` for gradient penalties and Hessians"


@works("Double backward (`create_graph=True`)", status="refused", note=REVERT)
@SOLVERS
def test_double_backward_is_refused(solver) -> None:
    model = small_model(solver)
    with pytest.raises(RuntimeError, match=r"^3: a proximal direction can't be differentiated again.*revert"):
        torch.autograd.grad(loss_of(model, images()), list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match=r"can't be differentiated again.*revert"):
        loss_of(model, images()).backward(create_graph=True)


def functional_loss(model: nn.Module, parameters: dict[str, Tensor], input: Tensor) -> Tensor:
    return loss_of(lambda x: torch.func.functional_call(model, parameters, (x,)), input)


@works("`torch.func.functional_call`")
@SOLVERS
def test_functional_call_with_other_parameters(solver) -> None:
    model, input = small_model(solver), images()
    others = {name: (1.5 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    found = torch.autograd.grad(functional_loss(model, others, input), list(others.values()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_same(dict(zip(others, found, strict=True)), directions(model, input))


FUNC = works(
    "`torch.func.grad`, `vjp`, `jacrev`, `hessian` while training",
    status="refused",
    note="they differentiate backward itself; `torch.func.functional_call` with `torch.autograd.grad` works, "
    "and so do they once nothing is trained",
)


@FUNC
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
@SOLVERS
def test_func_grad_is_refused(solver, transform) -> None:
    model = small_model(solver)
    parameters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"^[03]: .*torch\.func.*revert"):
        transform(lambda values: functional_loss(model, values, images()))(parameters)


@FUNC
@SOLVERS
def test_func_over_the_input_is_not_silent_about_the_parameters(solver) -> None:
    """The parameters are trained although only the input is differentiated: they must not lose their direction."""
    model = small_model(solver)
    with pytest.raises(RuntimeError, match=r"torch\.func.*revert"):
        torch.func.grad(lambda x: loss_of(model, x))(images())
    with pytest.raises(RuntimeError, match=r"torch\.func.*revert"):
        torch.func.vjp(model, images())
    model.requires_grad_(False)
    plain = plain_model()
    found, expected = (torch.func.grad(lambda x, m=m: loss_of(m, x))(images()) for m in (model, plain))
    assert relative_error(found, expected) < 1e-12


@works(
    "`torch.vmap` while training (per-sample gradients)",
    status="refused",
    note="a direction belongs to a whole batch; `proxprop.revert(model)` first",
)
@SOLVERS
def test_vmap_with_gradients_is_refused(solver) -> None:
    model = small_model(solver)
    with pytest.raises(RuntimeError, match=r"^0: .*vmap.*revert"):
        torch.vmap(lambda image: model(image[None])[0])(images())
    parameters = dict(model.named_parameters())
    per_sample = torch.func.grad(lambda values, x: functional_loss(model, values, x[None]))
    with pytest.raises(RuntimeError, match=r"^0: .*vmap.*revert"):
        torch.vmap(per_sample, in_dims=(None, 0))(parameters, images())


@works("`torch.vmap` without gradients")
def test_vmap_without_gradients_is_torchs() -> None:
    model, plain = small_model(), plain_model()
    with torch.no_grad():
        found, expected = (torch.vmap(lambda image, m=m: m(image[None])[0])(images()) for m in (model, plain))
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp rules are scripted
@works("Forward-mode differentiation while training", status="refused", note="`proxprop.revert(model)` first")
def test_forward_mode_is_refused() -> None:
    model, input = small_model(), images()
    with pytest.raises(RuntimeError, match=r"^0: .*forward-mode.*revert"):
        torch.func.jvp(model, (input,), (torch.ones_like(input),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"^0: .*forward-mode.*revert"):
        model(forward_ad.make_dual(input, torch.ones_like(input)))
