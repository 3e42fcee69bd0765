"""DistributedDataParallel: the same directions as one process with the concatenated batch."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from networks import NETWORKS
from parity import assert_parity, assert_same_on_all_ranks, mean_square, one_process, share, whole
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import proxprop
from proxprop import Attached
from proxprop.deferred.collectives import packed_size

Wrapped = tuple[DistributedDataParallel, torch.optim.Optimizer, Attached]


def wrapped(network: str, **options: object) -> Wrapped:
    model = DistributedDataParallel(NETWORKS[network].model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, proxprop.attach(optimizer, model)


def one_step(network: str, **options: object) -> None:
    """Forward, backward, step; twice, because DDP rebuilds its buckets after the first."""
    model, optimizer, _ = wrapped(network, **options)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model.load_state_dict(start)
        optimizer.zero_grad()
        mean_square(model(share(whole(network)))).backward()
        optimizer.step()
        assert_parity(model, one_process(network))


def attached_before_wrapping() -> None:
    """A trainer may wrap the model after the user attached it."""
    model = NETWORKS["exact"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model)
    wrapper = DistributedDataParallel(model)
    mean_square(wrapper(share(whole("exact")))).backward()
    optimizer.step()
    assert_parity(model, one_process("exact"))


def solved_before_clipping() -> None:
    """`solve` before the step, which then has nothing left to solve."""
    model, optimizer, attached = wrapped("exact")
    mean_square(model(share(whole("exact")))).backward()
    attached.solve()
    assert_parity(model, one_process("exact"))
    optimizer.step()
    assert_parity(model, one_process("exact"))


def accumulated(synchronised: bool) -> None:
    """Micro-batches of different sizes, each weighted by its share of the rank's samples."""
    model, optimizer, _ = wrapped("gradient")
    mine = share(whole("gradient"))
    parts = mine.split([1, 2, len(mine) - 3])
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        with nullcontext() if synchronised or last else model.no_sync():
            (len(part) / len(mine) * mean_square(model(part))).backward()
    optimizer.step()
    assert_parity(model, one_process("gradient"))


def skipped_step() -> None:
    """A gradient that was thrown away takes its S with it."""
    for to_none in (True, False):
        model, optimizer, _ = wrapped("exact")
        mean_square(model(100 * share(whole("exact")))).backward()
        optimizer.zero_grad(set_to_none=to_none)
        mean_square(model(share(whole("exact")))).backward()
        optimizer.step()
        assert_parity(model, one_process("exact"))


def two_optimizers() -> None:
    model = DistributedDataParallel(NETWORKS["exact"].model())
    *early, w, b = model.parameters()
    optimizers = [torch.optim.SGD(early, lr=0.1), torch.optim.Adam([w, b], lr=0.1)]
    proxprop.attach(optimizers, model)
    mean_square(model(share(whole("exact")))).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_parity(model, one_process("exact"))


def zero_redundancy() -> None:
    """An optimizer that spreads its state over ranks; the directions are on all of them."""
    model = DistributedDataParallel(NETWORKS["exact"].model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    proxprop.attach(optimizer, model)
    mean_square(model(share(whole("exact")))).backward()
    optimizer.step()
    assert_parity(model, one_process("exact"))
    for parameter in model.parameters():
        assert_same_on_all_ranks(parameter.detach())


def scaled_loss() -> None:
    """A gradient scaler skips a step with an infinity on one rank, on all ranks, and goes on."""
    model, optimizer, _ = wrapped("exact")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    start = [p.detach().clone() for p in model.parameters()]
    for broken in (True, False):
        optimizer.zero_grad()
        batch = share(whole("exact")).clone()
        if broken and dist.get_rank() == 0:
            batch[0, 0] = torch.inf
        scaler.scale(mean_square(model(batch))).backward()
        scaler.step(optimizer)
        scaler.update()
        if broken:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    assert_parity(model, one_process("exact"))


class Forked(nn.Module):
    """The second layer is used by even ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.second(x).tanh() if use else x)


def layer_unused_on_some_ranks(wrapped_later: bool = False) -> None:
    """S of a layer comes from the ranks that used it; in the first step too, if it was attached before."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return proxprop.convert(Forked().double(), proxprop.Exact(), tau_theta=0.5)

    def loss(model: nn.Module, rank: int) -> Tensor:
        return mean_square(model(whole("exact").chunk(dist.get_world_size())[rank], rank % 2 == 0))

    inner = build()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.0)
    if wrapped_later:
        proxprop.attach(optimizer, inner)
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    if not wrapped_later:
        proxprop.attach(optimizer, model)
    alone = build()
    reference = torch.optim.SGD(alone.parameters(), lr=0.0)
    proxprop.attach(reference, alone)
    for _ in range(2):
        optimizer.zero_grad()
        with model.no_sync() if dist.get_rank() == 0 else nullcontext():
            loss(model, dist.get_rank()).backward()  # a rank with one micro-batch more, given up
        if dist.get_rank() == 0:
            optimizer.zero_grad()
            loss(model, dist.get_rank()).backward()
        optimizer.step()
    sum(loss(alone, rank) for rank in range(dist.get_world_size())).div(dist.get_world_size()).backward()
    reference.step()
    assert_parity(model, {name: p.grad for name, p in alone.named_parameters()})


def given_up_under_no_sync() -> None:
    """A rank that does not use a layer in the next pass sends nothing of what it gave up."""
    torch.manual_seed(1)
    alone = proxprop.convert(Forked().double(), proxprop.Exact(), tau_theta=0.5)
    model = DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=True)
    batches = whole("exact").chunk(ranks := dist.get_world_size())
    own, uses = batches[rank := dist.get_rank()], [r % 2 == 0 for r in range(ranks)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in (model, alone)]
    for optimizer, each in zip(optimizers, (model, alone), strict=True):
        proxprop.attach(optimizer, each)
    with model.no_sync():
        mean_square(model(1e3 * own, uses[rank])).backward()
    optimizers[0].zero_grad(set_to_none=False)
    mean_square(model(own, not uses[rank])).backward()
    sum(mean_square(alone(x, not used)) for x, used in zip(batches, uses, strict=True)).div(ranks).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_parity(model, {name: p.grad for name, p in alone.named_parameters()})


def zero_gradient_in_a_bucket() -> None:
    """Inputs that are zero leave a weight's gradient zero and count all the same, though its bucket is written to."""
    torch.manual_seed(1)
    alone = proxprop.convert(Forked().double(), proxprop.Exact(), tau_theta=0.5)
    model = DistributedDataParallel(copy.deepcopy(alone), gradient_as_bucket_view=True)
    batches = whole("exact").chunk(ranks := dist.get_world_size())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in (model, alone)]
    for optimizer, each in zip(optimizers, (model, alone), strict=True):
        proxprop.attach(optimizer, each)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        with model.no_sync():
            mean_square(model(torch.zeros_like(batches[0]), True)).backward()
        mean_square(model(batches[dist.get_rank()], True)).backward()
        for x in batches:
            sum(mean_square(alone(part, True)) for part in (torch.zeros_like(x), x)).div(ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_parity(model, {name: p.grad for name, p in alone.named_parameters()})


class Attending(nn.Module):
    """Attention that even ranks alone use in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(6, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.first(x).tanh()[:, None]
        x = self.attention(x, x, x, need_weights=False)[0] if use else x
        return self.last(x[:, 0])


def attention_unused_on_some_ranks() -> None:
    """Ranks agree on the parts of attention that are in use, also those that use none of them."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return proxprop.convert(Attending().double(), proxprop.Exact(), tau_theta=0.5)

    ranks = dist.get_world_size()
    model, alone = DistributedDataParallel(build(), find_unused_parameters=True), build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for optimizer, each in zip(optimizers, (model, alone), strict=True):
        proxprop.attach(optimizer, each)
    parts = whole("exact").chunk(ranks)
    for step in range(2):
        losses = [mean_square(alone(parts[rank], rank % 2 <= step)) for rank in range(ranks)]
        (sum(losses) / ranks).backward()
        mean_square(model(parts[dist.get_rank()], dist.get_rank() % 2 <= step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_parity(model, {name: p.grad for name, p in alone.named_parameters()})
        for optimizer in optimizers:
            optimizer.zero_grad()


class Repeated(nn.Module):
    """One layer three times, each recomputed in a backward pass inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.repeated, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda x: self.repeated(x).tanh(), x, use_reentrant=True)
        return self.last(x)


def layer_reached_several_times() -> None:
    """What a layer adds after its S was sent is sent as well."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return proxprop.convert(Repeated().double(), proxprop.Exact(), tau_theta=0.5)

    alone, model = build(), DistributedDataParallel(build(), static_graph=True)
    for each, batch in ((alone, whole("exact")), (model, share(whole("exact")))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.0)
        attached = proxprop.attach(optimizer, each)
        if group := attached.clusters[0].group:
            group.limit = 1  # a bucket for each layer
        for _ in range(2):
            optimizer.zero_grad()
            mean_square(each(batch)).backward()
            optimizer.step()
    assert_parity(model, {name: p.grad for name, p in alone.named_parameters()})


def uneven_inputs(divide_by_initial: bool) -> None:
    """Rank r has r + 1 batches: in step k the ranks that still have one take part, the others bring nothing."""
    model, optimizer, attached = wrapped("exact")
    batches = whole("exact").chunk(dist.get_world_size() * 2)
    mine = [batches[dist.get_rank() + i] for i in range(dist.get_rank() + 1)]
    ranks = dist.get_world_size()
    with Join([model, attached], divide_by_initial_world_size=divide_by_initial):
        for step, batch in enumerate(mine):
            optimizer.zero_grad()
            start = {name: value.clone() for name, value in model.module.state_dict().items()}
            mean_square(model(batch)).backward()
            optimizer.step()
            active = range(step, ranks)
            divisor = ranks if divide_by_initial else len(active)
            taken = torch.cat([batches[rank + step] for rank in active])
            alone = NETWORKS["exact"].model()
            alone.load_state_dict(start)
            parts = alone(taken).chunk(len(active))
            sum(mean_square(part) for part in parts).div(divisor).backward()
            assert_parity(model, {name: p.grad for name, p in alone.named_parameters()})


def join_without_the_attachment_is_refused() -> None:
    model, _, _ = wrapped("exact")
    message = ""
    try:
        with model.join():
            mean_square(model(share(whole("exact")))).backward()
    except RuntimeError as error:
        message = str(error)
    assert "Join([model, attached])" in message, message


def unequal_shares(weighted: bool) -> None:
    """Rank r has r + 2 samples. DDP averages the ranks' means; weights make that the mean over all samples."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = [r + 2 for r in range(ranks)]
    batch = whole("exact", sum(sizes))
    model, optimizer, _ = wrapped("exact")
    weight = ranks * sizes[rank] / sum(sizes) if weighted else 1.0
    (weight * mean_square(model(batch.split(sizes)[rank]))).backward()
    optimizer.step()

    def loss(output: Tensor) -> Tensor:
        if weighted:
            return mean_square(output)
        return sum(mean_square(part) for part in output.split(sizes)) / ranks

    assert_parity(model, one_process("exact", loss, sum(sizes)))


def bytes_are_counted() -> None:
    """One step sends the triangle of every S once, in one call where they fit into a bucket."""
    model, optimizer, attached = wrapped("exact")
    mean_square(model(share(whole("exact")))).backward()
    optimizer.step()
    sizes = {cluster: packed_size(cluster.systems[0].leaves[0].shape) for cluster in attached.clusters}
    others = 8 * sum(size for cluster, size in sizes.items() if not cluster.mine)
    own = 8 * sum(p.numel() for cluster in sizes if cluster.mine for p in cluster.parameters)
    own *= dist.get_world_size() - 1
    traffic = attached.reduction.ranks.traffic
    assert traffic.bytes == {"S": others, "directions": own}, traffic
    assert attached.bytes_sent == others + own
    owners = {cluster.owner for cluster in attached.clusters}
    assert traffic.calls == {"S": len(owners), "directions": len(owners)}


def sent_while_backward_runs() -> None:
    """With small buckets, S of the last layer is on its way before backward has reached the first."""
    model, _, attached = wrapped("exact")
    attached.clusters[0].group.limit = 1
    seen, traffic = [], attached.reduction.ranks.traffic
    model.module[0].register_full_backward_hook(lambda *_: seen.append(traffic.calls["S"]))
    mean_square(model(share(whole("exact")))).backward()
    assert seen == [1], seen
    assert traffic.calls["S"] == 2


def warned_once_in_immediate_mode() -> None:
    """Averages of local solutions are another algorithm, and the user hears of it once."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = DistributedDataParallel(NETWORKS["exact"].model())
            mean_square(model(share(whole("exact")))).backward()
    told = [str(w.message) for w in caught if "proxprop.attach" in str(w.message)]
    assert len(told) == 1, told


def a_dropped_wrapper_ends_at_once() -> None:
    """Not when garbage is collected: it holds process groups, which have to end before the process does."""
    wrapped("exact")  # the first wrapper of a process is held by a frame of torch's
    gc.collect()
    gc.disable()
    try:
        model, optimizer, _ = wrapped("exact")
        mean_square(model(share(whole("exact")))).backward()
        optimizer.step()
        there = weakref.ref(model)
        del model, optimizer, _
        assert there() is None
    finally:
        gc.enable()


def bounded_steps() -> None:
    """Ranks hold the same parameters and take the same steps, so that they cut them alike: as one process does."""
    together = DistributedDataParallel(NETWORKS["exact"].model())
    alone = NETWORKS["exact"].model()
    for model, batch in ((together, share(whole("exact"))), (alone, whole("exact"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e4, momentum=0.9)
        proxprop.attach(optimizer, model)
        bounded = proxprop.bound(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(model(batch)).backward()
            optimizer.step()
        assert_same_on_all_ranks(bounded.factor)
        assert 0 < bounded.factor < 1
    for found, expected in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


CASES: dict[str, Callable[[], None]] = {
    **{f"ddp-{name}": partial(one_step, name) for name in NETWORKS},
    "ddp-static-graph": partial(one_step, "exact", static_graph=True),
    "ddp-bucket-view": partial(one_step, "exact", gradient_as_bucket_view=True),
    "ddp-small-buckets": partial(one_step, "convnet", bucket_cap_mb=0.0001),
    "ddp-wrapped-later": attached_before_wrapping,
    "ddp-solve": solved_before_clipping,
    "ddp-no-sync": partial(accumulated, synchronised=False),
    "ddp-accumulate": partial(accumulated, synchronised=True),
    "ddp-skipped-step": skipped_step,
    "ddp-two-optimizers": two_optimizers,
    "ddp-zero": zero_redundancy,
    "ddp-scaler": scaled_loss,
    "ddp-reentrant": layer_reached_several_times,
    "ddp-unused": layer_unused_on_some_ranks,
    "ddp-unused-wrapped-later": partial(layer_unused_on_some_ranks, wrapped_later=True),
    "ddp-zero-gradient": zero_gradient_in_a_bucket,
    "ddp-given-up": given_up_under_no_sync,
    "ddp-unused-attention": attention_unused_on_some_ranks,
    "ddp-join": partial(uneven_inputs, divide_by_initial=True),
    "ddp-join-divide": partial(uneven_inputs, divide_by_initial=False),
    "ddp-join-refused": join_without_the_attachment_is_refused,
    "ddp-unequal": partial(unequal_shares, weighted=False),
    "ddp-unequal-weighted": partial(unequal_shares, weighted=True),
    "ddp-bytes": bytes_are_counted,
    "ddp-dropped": a_dropped_wrapper_ends_at_once,
    "ddp-bounded": bounded_steps,
    "ddp-overlap": sent_while_backward_runs,
    "ddp-immediate-warns": warned_once_in_immediate_mode,
}
