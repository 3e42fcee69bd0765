"""Experts: layers that one rank alone holds, among layers that all share."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from owned import RUNNING
from parity import TOLERANCE, gathered, mean_square, whole
from sharded import mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import proxprop
from proxprop import Attached, Exact, Running


class Mixture(nn.Module):
    """A shared layer, experts by the rank that holds them, and two shared layers; an expert sees few tokens."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        self.first, self.second, last = (nn.Linear(6, 6) for _ in range(3))
        self.experts = nn.ModuleDict({str(rank): expert(rank) for rank in experts})
        self.last = last

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.first(x).tanh()
        tokens = rank + 2
        seen = self.experts[str(rank)](x[:tokens]).tanh()
        return self.last(self.second(torch.cat([seen, x[tokens:]])).tanh())


def expert(rank: int) -> nn.Linear:
    torch.manual_seed(10 + rank)
    return nn.Linear(6, 6)


def built(experts: range) -> nn.Module:
    torch.manual_seed(1)
    model = Mixture(experts).double()
    return proxprop.convert(model, Exact(), tau_theta=0.5, scaling="gradient")


def spread(kind: str, rank: int) -> nn.Module:
    """The rank's own expert is left alone by what spreads the rest."""
    model = built(range(rank, rank + 1))
    own = [name for name, _ in model.named_parameters() if "experts" in name]
    if kind == "fsdp":
        fully_shard(model, mesh=mesh(), ignored_params={model.get_parameter(name) for name in own})
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return DistributedDataParallel(model)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module."), parameter


def as_one_process(kind: str, running: Running | None) -> None:
    """Each expert's S and number of samples are those of its own tokens."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, alone = spread(kind, rank), built(range(ranks))
    runs = []
    for each in (model, alone):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        runs.append((optimizer, proxprop.attach(optimizer, each, running=running)))
    for step in range(3):
        batches = (whole("exact") * (1 + step)).chunk(ranks)
        for optimizer, _ in runs:
            optimizer.zero_grad()
        mean_square(model(batches[rank], rank)).backward()
        for name, parameter in named(model):
            if "experts" in name:
                parameter.grad.div_(ranks)  # nobody averages it over ranks
        sum(mean_square(alone(batch, r)) for r, batch in enumerate(batches)).div(ranks).backward()
        for optimizer, _ in runs:
            optimizer.step()
        expected = dict(named(alone))
        for name, parameter in named(model):
            found, right = gathered(parameter.grad), expected[name].grad
            error = float((found - right).norm() / right.norm())
            assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"
    check_owners(runs[0][1], rank)


def check_owners(attached: Attached, rank: int) -> None:
    """Shared layers have owners; the expert has none but its rank, which counts its tokens alone."""
    routes = {cluster.name: cluster.route for cluster in attached.clusters}
    assert routes.pop(f"experts.{rank}") is None
    assert all(route is not None for route in routes.values())
    if state := attached.state_dict():
        seen = (1 + 0.8 + 0.64) * (rank + 2)  # in three steps, at a decay of 0.8
        assert float(state[f"experts.{rank}.samples"]) == pytest.approx(seen)


CASES: dict[str, Callable[[], None]] = {
    **{f"experts-{kind}": partial(as_one_process, kind, None) for kind in ("ddp", "fsdp")},
    **{
        f"experts-{kind}-running": partial(as_one_process, kind, RUNNING["every"]) for kind in ("ddp", "fsdp")
    },
}
