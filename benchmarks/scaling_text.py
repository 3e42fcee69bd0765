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

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: "nccl" alone
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = proxprop.convert(model, proxprop.Exact(), tau_theta=0.5, scaling="gradient")
model = DistributedDataParallel(model)  # or fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attached = proxprop.attach(optimizer, model)
```

Only two lines differ from plain training: `convert` before wrapping, and `attach` once the optimizer is made.
`examples/ddp.py` and `examples/fsdp.py` are complete scripts.

`D = (λI + S)⁻¹B` needs two sums over the batch. DDP and FSDP2 average gradients over R ranks, `B = (1/R) Σ B_r`. S is
summed, `S = Σ S_r`, and so is the number of samples N where the scaling needs it. Therefore, with a loss that is a
mean over the rank's own samples:

- **Equal shares** (n samples on every rank): B is the gradient of the mean over all R·n samples, and D is, to
  rounding, the direction of one process with the concatenated batch. Tests check it to 1e-9 in float64 on 2 and 4
  ranks.
- **Unequal shares** (n_r on rank r): B is the gradient of the mean of the ranks' means, as without ProxProp, and D is
  the direction of one process with that loss. For the mean over all N samples, multiply the rank's loss by `R·n_r/N`.
- **Micro-batches**: weight each by its share of the rank's samples, `(loss * len(x) / n_r).backward()`, under
  `no_sync` (DDP) or `set_requires_gradient_sync(False)` (FSDP2) for all but the last.
- **Uneven inputs**: `with Join([model, attached]):`. A rank without inputs adds nothing to S. DDP divides B by all
  ranks, or with `divide_by_initial_world_size=False` by those that still have inputs; D follows B.

Under DDP S is sent while backward still runs, as packed triangles in buckets of 25 MB on a process group of its own.
The order is the same on all ranks, even if they use different layers. Under FSDP2 S is sent when the optimizer steps,
each bucket on its way while earlier ones are solved. S goes over all ranks of the mesh, hybrid or not, and each rank
solves for the outputs it owns. Parameters that are not sharded by outputs (grouped and transposed convolutions,
normalisations, slices of packed attention weights, transposed weights) are gathered, solved and sharded again.
`attached.bytes_sent` counts what was sent. Tensor parallel layers are refused by name.
"""

FROM_PIECES = """\
Terms are `latency + work / rate`, fitted to timings of the pieces of a solve at several sizes. FLOPs are
`2·samples·features²` for S, `features³/3` for its factor and `2·features²·outputs` for a solve or a product. How much
longer a convolution's S takes than its FLOPs say is fitted to the ResNet's deferred step; no other row of the last
table was used for fitting. Its steps are eager and wait for the host if layers are small. The model knows of this
only through that one number, so it predicts too little for the MLP and the GPT-2 block, and too much for a ResNet
whose step is captured in a CUDA graph.
"""

ASSUMED = """## From 1 to 1,024 GPUs

Assumed, not measured: 8 GPUs a node, 450 GB/s between GPUs of a node (NVLink), 50 GB/s a GPU between nodes
(InfiniBand), 20 µs · log₂(ranks) a call. The batch of a GPU does not depend on the number of GPUs. A step takes

    BackProp's FLOPs / measured FLOP/s + S + factorisation / invert_every
      + solve + packing + what backward does not hide

- An all-reduce moves `2(r − 1)/r` of its bytes inside a node of r GPUs, and `2(n − 1)/n` of an eighth of them between
  n nodes.
- Two thirds of BackProp's time, its backward, hide communication. Under DDP that is gradients and S; under FSDP2 it
  is two gathers and a reduce-scatter, and S is not hidden.
- Under FSDP2 a rank solves for `1/ranks` of the outputs. S is not sharded: each rank holds and factorises all of it.
- S is formed, sent and averaged in every step (`update_every=1`), and running averages are inverted in one step of
  ten (`invert_every=10`). The default of `Running`, `update_every=10`, also forms and sends S in one step of ten
  only; it is not modelled here.
- S is float32 and takes `features²` numbers a layer, half of that under DDP, where it waits packed. A running average
  takes twice `features²` more, for the average and the inverse. "State" is 16 bytes a parameter: weight, gradient and
  Adam's moments.
"""

LIMITS = """## Where it stops paying

ProxProp pays if it saves more in steps than each step costs: at a ratio of 1.2 it has to reach the same loss in five
sixths of the steps. By this model:

- **The number of GPUs hardly matters.** S goes over the same links as gradients and is about as large. So what does
  not pay on one GPU does not pay on 1,024, and vice versa. On 8 GPUs under FSDP2 a running average costs {resnet} for
  ResNet-50, {gpt} for GPT-2 medium and {llama} for Llama-7B's shapes.
- **Small batches per GPU do matter.** Factorising and applying S does not shrink with the batch: with one sequence a
  GPU instead of eight, GPT-2 medium on 1,024 GPUs goes from {fast} to {strong} under DDP. ProxProp stops paying first
  if a fixed batch is spread over ever more GPUs.
- **Each batch's S, factorised in every step**, costs {batch} on GPT-2 medium under DDP: every rank factorises every
  S, and more GPUs do not make that cheaper. Use `Running()` for all but small layers.
- **Slow networks**: at 1.25 GB/s between nodes (10 Gbit/s Ethernet) BackProp itself waits for gradients, and ProxProp
  for S as well: {slow} on 1,024 GPUs under DDP.
- **BackProp in BF16**: S is a product in TF32 beside BackProp's in half precision. For Llama-7B's shapes on 1,024 GPUs
  the ratio is {whole}; S from 2,048 rows of a GPU's batch (`Running(update_every=1, rows=2048)`)
  bring it to {sampled}.
- **Memory limits Llama-7B's shapes**: S with its running average takes {memory} GB on every GPU, because S is not
  sharded. Its 32 widest layers (11,008 features) take over half of that: leave them out with `exclude`, or let
  `attach(max_bytes=...)` leave them explicit. A layer as wide as a vocabulary is left explicit by default.

The model leaves out kernels that overlap, the memory traffic of averages, and stragglers. Attention's own FLOPs are
part of BackProp's measured speed but are not counted separately.
"""
