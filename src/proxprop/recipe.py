"""One line for people who do not want to choose: `wrap` converts a model and attaches it, by the recipe below.

| setting | value | why |
| --- | --- | --- |
| `running` | decay 0.95, ρ 0.3, S of one step in ten | an average serves many steps |
| its `power` | 0.5 | the root helps as often, hurts less often, and forgives little damping |
| its `invert_every` | 40 | a root takes about four inverses, so it costs as much as an inverse in one step of ten |
| `solver` | `Exact()` | an average is inverted once for many steps |
| `scaling` | `"gradient"` | directions as long as gradients, so that BackProp's learning rate is a good start |

The recipe is the same for every optimizer, and `tests/test_recipe.py` holds it to the records (docs/peers.md, twelve
small tasks, five of them held out until all methods were fixed). Tuned, the root made AdamW clearly better in six and
worse in one, Muon better in three and worse in one, SGD better in five and worse in one. With these settings and the
rate that is best without S, it was better with every seed in three of seven tasks under AdamW and worse in one, in five
and none under Muon. Under SOAP the root made one task better and three worse: `wrap` says so to the logger. No GPU task
has been run with a root, nor a root been timed on a GPU.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict, Unpack

from torch import nn
from torch.optim import Optimizer

from proxprop.conversion import check_module, convert, revert
from proxprop.deferred import Attached, Running, attach
from proxprop.deferred.attaching import MAX_BYTES, Fallback
from proxprop.nn import ProximalLayer
from proxprop.settings import Scaling, Space
from proxprop.solvers import Exact, Solver

log = logging.getLogger("proxprop")


HARMED = {"SOAP": ("one", "three")}
"""Optimizers, by a part of their class's name, that the recipe made better in fewer small tasks than worse."""


class Conversion(TypedDict, total=False):
    """What `proxprop.convert` takes beside the model."""

    solver: Solver
    tau_theta: float
    scaling: Scaling
    space: Space | None
    exclude: Sequence[str]
    include_last: bool
    module_types: Iterable[type[nn.Module]] | Literal["all"] | None


class Options(Conversion, total=False):
    """What `wrap` takes beside the optimizer and the model."""

    running: Running | None
    max_bytes: int
    fallback: Fallback


RUNNING = Running(decay=0.95, update_every=10, invert_every=40, damping=0.3, power=0.5)
"""The running average of the recipe, with the settings of `results/questions/rates.csv`."""

CONVERSION: Conversion = {"solver": Exact(), "scaling": "gradient"}
"""How the recipe converts. With `RUNNING` only layers without an S feel the scaling."""


def wrap(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    running: Running | None = RUNNING,
    max_bytes: int = MAX_BYTES,
    fallback: Fallback = "explicit",
    **conversion: Unpack[Conversion],
) -> Attached:
    """Convert a model and attach it to its optimizer, with settings that work on most tasks.

    It is `proxprop.convert` followed by `proxprop.attach`, with this module's recipe where nothing else is asked for.
    The learning rate, the schedule and the training loop stay as they are. A model that has proximal layers already
    keeps them and their settings, and is only attached. The optimizer may have taken steps before. Where something
    is refused, the model is left as it was.

    Args:
        optimizer: made from the model's parameters, or several that share them.
        model: any module with more than one linear or convolutional layer.
        running: as in `attach`; None solves each step from its own samples alone.
        max_bytes: as in `attach`.
        fallback: as in `attach`.
        conversion: `exclude`, `include_last`, `module_types`, `solver`, `tau_theta`, `scaling` and `space` as in
            `convert`.

    Returns:
        The handle of `attach`. Call its `.solve()` before clipping, `.state_dict()` for checkpoints, and `.detach()`
        to stop.

    Raises:
        TypeError: something is not an optimizer, not a model or not a setting.
        ValueError: nothing can be converted, the optimizer holds other parameters than the model's, the model is
            attached already, or it is converted already and settings of `convert` are given.

    Example:
        >>> import torch, proxprop
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> proxprop.wrap(optimizer, model)
        Attached(
          0: deferred, S takes 100 B
        )
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
    """
    check_module(model, "wrap")
    kept = any(isinstance(module, ProximalLayer) for module in model.modules())
    if kept and conversion:
        raise ValueError(
            f"the model is converted already, so wrap can't set {', '.join(conversion)}: call "
            "proxprop.revert(model) first, or give the settings to proxprop.convert and none here"
        )
    if not kept:
        settings: Conversion = {**CONVERSION, **conversion}
        convert(model, **settings)
    try:
        attached = attach(optimizer, model, running=running, max_bytes=max_bytes, fallback=fallback)
    except Exception:
        if not kept:
            revert(model)
        raise
    for name, outcome in HARMED.items():
        if running is not None and any(name in type(held).__name__ for held in attached.optimizers):
            log.warning(
                "under %s a running √S made %s of twelve small tasks better and %s worse (docs/peers.md): compare with "
                "%s alone",
                *(name, *outcome, name),
            )
    return attached
