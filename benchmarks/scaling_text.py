"""The words of docs/scaling.md."""

INTRODUCTION = """# ProxProp on many GPUs

`benchmarks/scaling.py` writes this page from the records in `results/`. One H200 and gloo processes on one machine
were measured. Everything about more GPUs is computed from that and from assumed network speeds.
"""

EXACT = """## When a step equals that of one process

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import proxprop

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: "nccl"
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = proxprop.convert(model, proxprop.Exact(), tau_theta=0.5, scaling="gradient")
model = DistributedDataParallel(model)  # or fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attached = proxprop.attach(optimizer, model)
```

Only two lines differ from plain training: `convert` before wrapping, and `attach` once the optimizer is made.
`examples/ddp.py` and `examples/fsdp.py` are complete scripts; the second trains a model of Llama's shape and resumes
from a checkpoint.

`D = (λI + S)⁻¹B` needs two sums over the batch. DDP and FSDP2 average gradients over R ranks, `B = (1/R) Σ B_r`. S is
summed, `S = Σ S_r`, and so is the number of samples N where the scaling needs it. Therefore, with a loss that is a
mean over the rank's own samples:

- **Equal shares** (n samples on every rank): B is the gradient of the mean over all R·n samples, and D is, to
  rounding, the direction of one process with the concatenated batch. Tests check it to 1e-9 in float64 on 2, 3 and 4
  ranks.
- **Unequal shares** (n_r on rank r): B is the gradient of the mean of the ranks' means, as without ProxProp, and D is
  the direction of one process with that loss. For the mean over all N samples, multiply the rank's loss by `R·n_r/N`.
- **Micro-batches**: weight each by its share of the rank's samples, `(loss * len(x) / n_r).backward()`, under
  `no_sync` (DDP) or `set_requires_gradient_sync(False)` (FSDP2) for all but the last.
- **Uneven inputs**: `with Join([model, attached]):`. A rank without inputs adds nothing to S. DDP divides B by all
  ranks, or with `divide_by_initial_world_size=False` by those that still have inputs; D follows B.

S is sent while backward still runs, as packed triangles in buckets of 25 MB on a process group of its own. The
order is the same on all ranks, even if they use different layers. Where FSDP2 has no outermost module, S is sent
when the optimizer steps. [Tensor parallel layers and experts](deferred.md#tensor-parallel-layers-and-experts) have
their own section.
"""

OWNERS = """## Who owns what

Each layer's statistics have one owner among the ranks. S is *reduced* to it, in observed steps only. The owner
alone keeps the average and inverts it, or solves with S where there is no average. So averages and inverses of all
ranks together take the memory of one copy, and inversions are shared out. `print(attached)` says where each layer's
are, and how directions come from there:

- the inverse goes to all ranks, once each time that it is made anew, and each rank turns the gradients it holds;
- or the gradient comes to the owner in every step, which turns it and sends the direction back. Under DDP the owner
  has the gradient already; under FSDP2 shards come from all ranks that hold them.

The way that moves fewer bytes is taken, as long as copies of inverses take no more than `Running(copies=...)` bytes
on a rank, 64 MiB by default. `copies=0` keeps every inverse on its owner alone, `copies=math.inf` minds traffic
only. An inverse can't go to all ranks if shards cut through its layer's features or groups (convolutions in groups
or transposed, normalisations, slices of packed attention weights), and a diagonal S always goes: it is smaller than
any gradient. Owners, turns and ways follow from shapes and names by pure functions (`deferred/owners.py`), so that
ranks need not ask each other. They compare once, and an error names the first layer in which ranks differ. Inside
`Join([model, attached])` an owner may have no gradient, so inverses are sent in every step.

`attached.bytes_held` is the memory of averages and inverses on this rank, `attached.bytes_sent` what it has sent for
others. `attached.state_dict()` has what this rank owns. `torch.distributed.checkpoint` saves that as one state, and
loads it on any number of ranks; `state_dict(whole=True)` brings all of it to every rank.
"""

FROM_PIECES = """\
Terms are `latency + work / rate`, fitted to timings of the pieces of a solve at several sizes. FLOPs are
`2·samples·features²` for S, `features³/3` for its factor and `2·features²·outputs` for a solve or a product. How
much longer a convolution's S takes than its FLOPs say is fitted to the ResNet's deferred step; no other row of the
first table of steps was used for fitting. These steps are eager and wait for the host if layers are small, of which
the model knows through that one number alone. Those in the second table were timed after layers had become torch's
own between observed steps.
"""

TIMED = """
Ranks on one machine share its memory and two cores with other work, so that rates are rough and fall as ranks are
added. Reducing to an owner moves half of what an all-reduce does. What ranks hold and send was counted, on the rank
that holds or inverts most; bytes sent are those of a step on average over ranks, ten steps, `Running()`:

"""

COUNTED = """
One process holds as much of inverses as of averages. Both fall with every rank if inverses stay with their owners. If
they go to all ranks, averages and inversions still fall, and less is sent.
"""

REST = """
The rest, what the parts leave of these three steps, is fitted as {step} ms for each layer and step, and {observed} ms
more for each layer and observed step. It is the host's time, or S in bfloat16 that is slower than taken. Compiled
steps and CUDA graphs were not measured: ratios below are without the rest, as if the host were never late, and the
column "eager" is with it.
"""

ASSUMED = """## From 1 to 1,024 GPUs

Assumed, not measured: 8 GPUs a node, 450 GB/s between GPUs of a node (NVLink), 50 GB/s a GPU between nodes
(InfiniBand), 20 µs · log₂(ranks) a call and 2.5 µs a rank for an exchange of all with all; that S of bfloat16
inputs is formed no faster than in TF32; that the host is never late but in the column "eager"; that Llama's
BackProp runs at the FLOP/s of the GPT-2 block in bfloat16. The batch of a GPU does not depend on the number of
GPUs. A step takes

    BackProp's FLOPs / measured FLOP/s + (S + packing) / update_every + inversions of its turn
      + products + inverses / invert_every + directions + what backward does not hide

- Reducing S to owners, or bringing inverses or directions to all ranks, moves `(r − 1)/r` of its bytes inside a
  node of r GPUs, and `(n − 1)/n` of an eighth of them between n nodes. An all-reduce of gradients takes twice as
  long.
- Two thirds of BackProp's time, its backward, hide gradients (under FSDP2 two gathers and a reduce-scatter) and S.
  Inverses and directions are not hidden.
- Owners and ways are those that the library's own functions choose. A step's inversions take as long as its busiest
  owner's, and all ranks wait for it.
- `Running()` forms and sends S in one step of ten, and inverts each layer in one step of ten. Layers that see the
  same input (query, key and value; gate and up) share S.
- "S" is what the fullest GPU keeps: averages and inverses that it owns, and copies of inverses, in float32. "S on
  its way" is there in an observed step beside it: the largest layer's S as it is formed and packed, and the packed
  sums that the GPU owns; on one GPU all S. "State" is 16 bytes a parameter: weight, gradient and Adam's moments.
"""

BALANCE = """## How even owners are

The longest over the mean, over all GPUs: of a step's inversions, by `features³`, and of what owners hold. By the
library's own functions, under FSDP2 with `Running()`. Once there are more GPUs than layers in a turn, some have
nothing to invert, and a step takes as long as its largest layer, however many GPUs there are.

"""

LIMITS = """
## Where it stops paying

ProxProp pays if it saves more in steps than each step costs: at a ratio of 1.2 it has to reach the same loss in five
sixths of the steps. By this model:

- **More GPUs make it cheaper.** With `Running()` GPT-2 medium goes from {gpt_alone} on one GPU to {gpt} on 64 under
  DDP and {gpt_sharded} under FSDP2, and Llama-7B's shapes from {llama_alone} to {llama} under FSDP2. Each batch's
  S, solved with in every step, goes from {batch} to {batch_many} for GPT-2 medium under DDP.
- **Memory falls with every GPU.** For Llama-7B's shapes on 64 GPUs averages and inverses take {state} GB on the
  fullest GPU, and {peak} GB in a step that observes.
- **The largest layer sets the end.** One inversion of 11,008 features takes {inverting} % of a step of Llama-7B's
  shapes, and some owner has one in every step. `Running(block=...)` cuts it.
- **Eager steps** take longer by what the host does: {gpt_eager} for GPT-2 medium on 64 GPUs under DDP, and
  {llama_eager} for Llama-7B's shapes under FSDP2.
- **Half precision makes BackProp faster, not the inversions**: GPT-2 medium in BF16 is at {gpt_half} on 64 GPUs
  under DDP.
- **Small batches per GPU matter.** Inverses and directions do not shrink with the batch: with one sequence a GPU
  instead of eight, GPT-2 medium on 64 GPUs goes from {gpt} to {strong} under DDP.
- **S of every step** (`update_every=1`) costs {observed} instead of {llama} for Llama-7B's shapes on 64 GPUs; with
  S from 2,048 rows of a GPU's batch (`rows=2048`) it costs {sampled}.
- **Slow networks**: at 1.25 GB/s between nodes (10 Gbit/s Ethernet) BackProp itself waits for gradients, and ProxProp
  for directions as well: {slow} on 64 GPUs under DDP. `Running(copies=math.inf)` sends inverses instead.

The model leaves out kernels that overlap, the memory traffic of averages, and stragglers. Attention's own FLOPs are
part of BackProp's measured speed but are not counted separately.
"""
