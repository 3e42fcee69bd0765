"""The benchmark's tasks are what they say, and every method trains every one of them."""

from itertools import product

import pytest
import torch
from torch import nn

from proxprop.lab.data import Dataset, Split
from proxprop.lab.models import ResNet18, convnet
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.run import FINISHED, Trained, run
from proxprop.lab.peers.spaces import Setting
from proxprop.lab.peers.tasks import (
    TASKS,
    adding,
    anisotropic,
    arithmetic,
    autoencoder,
    burgers,
    cifar10,
    convection,
    digits,
    gpt,
    image,
    poisson,
)

pytest.importorskip("pytorch_optimizer")
CPU = torch.device("cpu")
SETTING = Setting(1e-3, 1e-4, 0.1, "linear", tau_theta=1.0, damping=0.3)


def pictures() -> Dataset:
    """Twelve random images in the place of CIFAR-10."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(12, 3, 8, 8, generator=generator), torch.arange(12) % 10
    split = Split(images, labels)
    return Dataset("pictures", split, split, split, 10)


class Tiny(nn.Sequential):
    """A convolution, a normalisation and a layer, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


SMALL = {
    task.name: task
    for task in (
        digits.make("digits", (64, 8, 10), batch=5, steps=2),
        anisotropic.make("anisotropic", "cpu", features=6, width=8, batch=5, steps=2),
        autoencoder.make("autoencoder", "cpu", 6, (8, 3), samples=16, batch=5, steps=2),
        image.make("image", "cpu", shrink=40, width=8, layers=2, batch=5, steps=2),
        poisson.make("poisson", "cpu", width=8, layers=2, batch=8, steps=2),
        convection.make("convection", "cpu", beta=2.0, width=8, layers=2, batch=8, steps=2),
        gpt.make("gpt", "cpu", layers=1, width=16, positions=8, samples=2, steps=2),
        cifar10.make("cifar10", "images", Tiny, batch=4, steps=2, augmented=True, data=pictures),
    )
}
HELD_OUT = {
    task.name: task
    for task in (
        digits.make("convnet", (8, 4, 10), filters=(3, 2), batch=5, steps=2),
        burgers.make("burgers", "cpu", viscosity=0.1, width=8, layers=2, batch=8, steps=2),
        image.make("flower", "cpu", shrink=40, width=8, layers=2, batch=5, steps=2, picture="flower.jpg"),
        adding.make("adding", "cpu", places=5, width=8, batch=5, steps=2),
        arithmetic.make("arithmetic", "cpu", layers=1, width=16, batch=5, steps=2),
    )
}
"""They are trained by AdamW alone here, so that their first runs with other methods are the recorded ones."""
FEW = {"adamw", "muon", "cg3+sgd", "running+muon"}
CROSS = [
    pytest.param(task, method, marks=[] if method in FEW or task == "digits" else pytest.mark.slow)
    for task, method in product(SMALL, METHODS)
]


@pytest.mark.parametrize(("task", "method"), CROSS)
def test_every_method_trains_every_task(task, method):
    outcome = run(SMALL[task], METHODS[method], SETTING, 1, CPU)
    assert outcome.status == FINISHED, outcome.note
    assert len(outcome.scores) == 3


@pytest.mark.parametrize("task", HELD_OUT)
def test_the_reference_trains_every_held_out_task(task):
    first, second = (run(HELD_OUT[task], METHODS["adamw"], SETTING, 1, CPU) for _ in range(2))
    assert first.status == FINISHED, first.note
    assert len(set(first.scores)) == 3, "every step changes the weights"
    assert first.scores == second.scores


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].ours])
def test_a_step_of_ours_is_not_the_optimizers_own(method):
    ours, plain = (
        Trained(SMALL["digits"], METHODS[name], SETTING, 1, CPU)
        for name in (method, method.partition("+")[2])
    )
    for trained in (ours, plain):
        for _ in range(2):  # SOAP leaves the weights alone in its first step
            trained.step()
    pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
    assert any(not torch.allclose(a, b, rtol=1e-5) for a, b in pairs)


def test_batch_normalisations_see_the_weights_that_are_measured():
    trained = Trained(SMALL["cifar10"], METHODS["schedule-free"], SETTING, 1, CPU)
    trained.step()
    before = trained.model[1].running_mean.clone()
    trained.measure()
    assert not torch.equal(trained.model[1].running_mean, before)
    plain = Trained(SMALL["cifar10"], METHODS["adamw"], SETTING, 1, CPU)
    before = plain.model[1].running_mean.clone()
    plain.measure()
    assert torch.equal(plain.model[1].running_mean, before)


def test_one_seed_gives_one_result():
    scores = [run(SMALL["digits"], METHODS["running+adamw"], SETTING, 3, CPU).scores for _ in range(2)]
    assert scores[0] == scores[1]
    assert scores[0] != run(SMALL["digits"], METHODS["running+adamw"], SETTING, 4, CPU).scores


def test_poissons_solution_has_no_loss():
    class Solution(nn.Module):
        def forward(self, x):
            return poisson.solution(x)

    batch = poisson.points(torch.Generator().manual_seed(0), 64)
    edge = batch[1]
    assert ((edge == 0) | (edge == 1)).any(1).all()
    assert float(poisson.loss(Solution(), batch).detach()) < 1e-8


def test_convections_solution_has_no_loss():
    class Solution(nn.Module):
        def forward(self, x):
            cosine, sine, time = x.split(1, dim=1)
            return sine * torch.cos(3 * time) - cosine * torch.sin(3 * time)

    batch = convection.points(torch.Generator().manual_seed(0), 64)
    assert float(convection.residual(Solution(), batch, 3.0).detach()) < 1e-8


def test_burgers_solution_has_no_loss():
    class Solution(nn.Module):
        def forward(self, x):
            return burgers.solution(x, 0.05)

    batch = tuple(part.double() for part in burgers.points(torch.Generator().manual_seed(0), 64))
    assert float(burgers.residual(Solution(), batch, 0.05).detach()) < 1e-20
    assert float(burgers.residual(Solution(), batch, 0.06).detach()) > 1e-4


def test_burgers_points_are_inside_at_the_start_and_on_the_walls():
    inside, start, walls = burgers.points(torch.Generator().manual_seed(0), 64)
    assert inside[:, 0].min() < -0.5
    assert inside[:, 1].min() > 0
    assert (start[:, 1] == 0).all()
    assert start[:, 0].min() < -0.5
    assert set(walls[:, 0].tolist()) == {-1.0, 1.0}
    assert all((part.abs() <= 1).all() for part in (inside, start, walls))


def test_two_values_are_marked_and_added():
    inputs, wanted = adding.sequences(torch.Generator().manual_seed(0), 32, 7)
    for sequence, total in zip(inputs, wanted, strict=True):
        places = sequence[:, 1].nonzero().flatten().tolist()
        assert len(places) == 2
        assert places[0] < 4 <= places[1]
        assert total.item() == pytest.approx(sum(sequence[place, 0].item() for place in places))
    assert set(inputs[..., 1].flatten().tolist()) == {0.0, 1.0}


def test_sums_are_right_and_none_is_both_trained_on_and_held_out():
    def pairs(part):
        texts = ["".join(arithmetic.TOKENS[place] for place in row) for row in part.tolist()]
        sums = [(int(text[:2]), int(text[3:5]), int(text[6:])) for text in texts]
        assert all(text[2] + text[5] == "+=" for text in texts)
        assert all(a + b == c for a, b, c in sums)
        return {frozenset((a, b)) for a, b, _ in sums}

    train, held = arithmetic.sums()
    assert len(train) + len(held) == 100**2
    assert 300 < len(held) < 700
    assert not pairs(train) & pairs(held)


def test_only_the_digits_of_an_answer_count():
    texts = arithmetic.tokens(torch.tensor([47, 3]), torch.tensor([85, 9]))
    scores = 50 * nn.functional.one_hot(texts[:, 1:], len(arithmetic.TOKENS)).float()
    scores[:, : -arithmetic.ANSWER] = 0
    assert float(arithmetic.loss(lambda _: scores, (texts,))) < 1e-6


def test_a_digit_is_guessed_from_what_stands_before_it():
    model = HELD_OUT["arithmetic"].problem(CPU).model()
    texts = arithmetic.tokens(torch.tensor([47]), torch.tensor([85]))[:, :-1]
    other = texts.clone()
    other[:, -1] = 0
    torch.testing.assert_close(model(texts)[:, :-1], model(other)[:, :-1])
    assert not torch.allclose(model(texts)[:, -1], model(other)[:, -1])


def test_the_convnet_is_trained_on_the_digits_that_the_mlp_is_trained_on():
    ours, theirs = (TASKS[name].problem(CPU) for name in ("convnet-small", "digits"))
    batches = [problem.batch(torch.Generator().manual_seed(0)) for problem in (ours, theirs)]
    assert all(torch.equal(*pair) for pair in zip(*batches, strict=True))
    kinds = [type(module) for module in ours.model() if hasattr(module, "weight")]
    assert kinds == [nn.Conv2d, nn.Conv2d, nn.Linear, nn.Linear]


def test_pictures_have_positions_and_colours_between_minus_one_and_one():
    found = [image.pixels(picture, 40) for picture in ("china.jpg", "flower.jpg")]
    assert not torch.equal(found[0][1], found[1][1])
    for positions, colours in found:
        assert (positions.shape[1], colours.shape[1]) == (2, 3)
        assert len(positions) == len(colours)
        assert positions.abs().max() <= 1
        assert colours.abs().max() <= 1


def test_no_autoencoder_is_below_the_entropy():
    images = autoencoder.curves(8, 10)
    perfect = torch.logit(images.double().clamp(1e-12, 1 - 1e-12))
    lowest = autoencoder.loss(lambda _: perfect, (images.double(),)) * 100
    torch.testing.assert_close(lowest, autoencoder.entropy(images), rtol=1e-6, atol=0)
    assert images.min() >= 0
    assert images.max() <= 1


def test_the_full_autoencoder_has_the_widths_it_is_known_by():
    layers = [
        layer for layer in autoencoder.autoencoder((784, 1000, 500, 250, 30)) if hasattr(layer, "weight")
    ]
    assert [layer.out_features for layer in layers] == [1000, 500, 250, 30, 250, 500, 1000, 784]


def test_inputs_have_the_spectrum_they_are_said_to_have():
    colour, _, _ = anisotropic.inputs_and_teacher(16, 8, 2, 1.5)
    variances = torch.linalg.eigvalsh(colour.T @ colour).flip(0)
    torch.testing.assert_close(variances, torch.arange(1, 17) ** -1.5, rtol=1e-3, atol=1e-6)


def test_an_augmented_image_is_moved_and_perhaps_mirrored():
    images = torch.arange(1.0, 2 * 3 * 8 * 8 + 1).view(2, 3, 8, 8)
    found = cifar10.augment(images.repeat(40, 1, 1, 1), torch.Generator().manual_seed(0))
    padded = nn.functional.pad(images, (4,) * 4)
    for index, picture in enumerate(found):
        moved = padded[index % 2].unfold(1, 8, 1).unfold(2, 8, 1).movedim(0, 2).flatten(0, 1)
        assert any(torch.equal(picture, other) for other in (*moved, *moved.flip(-1)))
    assert len(found.flatten(1).unique(dim=0)) > 40


def test_the_tasks_for_a_gpu_are_the_papers_and_the_usual_ones():
    assert {name for name, task in TASKS.items() if task.size == "gpu"} == {
        *("cifar10-mlp", "cifar10-convnet", "cifar10-resnet18", "autoencoder", "gpt", "image"),
        *("poisson", "convection", "anisotropic"),
    }
    assert all(task.every * task.measures <= task.steps for task in TASKS.values())


def test_the_tasks_that_are_held_out_are_small():
    held = {name for name, task in TASKS.items() if task.held_out}
    assert held == {"convnet-small", "burgers-small", "flower-small", "adding-small", "arithmetic-small"}
    assert all(TASKS[name].size == "cpu" for name in held)


@pytest.mark.slow
@pytest.mark.parametrize("model", [lambda: convnet((3, 8, 8), 10), lambda: ResNet18(3, 10)])
@pytest.mark.parametrize("method", ["soap", "muon", "cg3+adamw"])
def test_the_networks_for_images_train(model, method):
    task = cifar10.make("cifar10", "images", model, batch=4, steps=1, augmented=True, data=pictures)
    assert run(task, METHODS[method], SETTING, 1, CPU).status == FINISHED
