"""A GPU that computes nothing, so that a machine without one runs the code that is meant for one.

Tensors are torch's fake tensors: they have a shape, a precision and the device "cuda", and no numbers. So torch itself
finds operands on two devices or of two precisions, and refuses whatever would make a host wait for numbers (`.item()`,
`bool(...)`, shapes that depend on values). Triton kernels are recorded in place of being launched.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from proxprop import device
from proxprop.transfer import conv_geometry, conv_gram

GPU = torch.device("cuda", 0)
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there, which tells more")
SEEN = torch.device("meta", 1)
"""What torch's own C++ takes the GPU for: a build of torch without CUDA has no streams for nodes of autograd."""


@dataclass(frozen=True)
class Launch:
    """A kernel that would have been launched.

    Attributes:
        kernel: the function decorated with `triton.jit`.
        grid: number of programs along each axis.
        given: its arguments by name.
        warps: of each program.
    """

    kernel: Any
    grid: tuple[int, ...]
    given: dict[str, Any]
    warps: int


@dataclass
class Work:
    """What a GPU would have been asked to do.

    Attributes:
        operations: how often each operation of torch was called that launches something; kernels of Triton by name.
        launches: of Triton.
        crossings: operations that copied between the GPU and the host while the host waited.
    """

    operations: Counter[str] = field(default_factory=Counter)
    launches: list[Launch] = field(default_factory=list)
    crossings: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of operations and kernels."""
        return self.operations.total()

    def clear(self) -> None:
        """Begin to count anew."""
        self.operations.clear()
        self.launches.clear()
        self.crossings.clear()


FREE = {
    "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "new_empty", "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_real", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
"""Operations that launch nothing."""


class Dry(FakeTensorMode):
    """Fake tensors, and a record of the operations on them."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=False)
        self.work = Work()
        self.inside = threading.local()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _seen(args[0])
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == SEEN:  # asked for by C++
            kwargs["device"] = GPU
        outermost = not getattr(self.inside, "now", False)
        self.inside.now = True
        try:
            found = self._found(func, types, args, kwargs)
        finally:
            self.inside.now = not outermost
        if outermost:
            self.note(func, args, kwargs, found)
        return found

    def _found(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.baddbmm.dtype_out:  # torch takes its precision for beta (2.13)
            product = torch.bmm(args[1].float(), args[2].float())
            assert product.shape == kwargs["out"].shape == args[0].shape
            return kwargs["out"]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Count an operation, unless it launches nothing."""
        name = func.overloadpacket.__name__
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        places = {t.device.type for t in (*given, *made) if t.dim() or t.is_cuda}
        if places == {"cpu", "cuda"} and not kwargs.get("non_blocking"):
            self.work.crossings.append(name)
        if name in FREE or "cuda" not in places or (made and not any(t.numel() for t in made)):
            return
        if name == "_to_copy" and (given[0].device, given[0].dtype) == (made[0].device, made[0].dtype):
            return  # C++ takes it for a copy because of SEEN
        self.work.operations[name] += 1

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        """Stands for `JITFunction.run`."""
        warps, _ = constants.pop("num_warps", 4), constants.pop("num_stages", None)
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **constants}
        self.work.operations[kernel.__name__] += 1
        self.work.launches.append(Launch(kernel, grid, given, warps))
        check_launch(self.work.launches[-1])


def check_launch(launch: Launch) -> None:
    """Raise AssertionError if a GPU would refuse a launch, or the kernel would read what is not there."""
    name = launch.kernel.__name__
    assert set(launch.given) == set(launch.kernel.arg_names), f"{name} lacks arguments"
    limits = (2**31 - 1, 65535, 65535)
    assert all(0 < size <= most for size, most in zip(launch.grid, limits, strict=False)), (
        f"{name}: {launch.grid}"
    )
    for key, array in launch.given.items():
        if isinstance(array, Tensor):
            assert array.device == GPU, f"{name}: {key} is on {array.device}"
            assert _is_known(array, launch.given), f"{name}: {key} has strides {array.stride()}"


def _is_known(array: Tensor, given: dict[str, Any]) -> bool:
    """Whether a kernel can know an array's strides: it is dense, or they are among the arguments or follow from them."""
    if array.is_contiguous() or array.mT.is_contiguous():
        return True
    known = {1, *(value for value in given.values() if isinstance(value, int))}
    known |= {size * step for size, step in zip(array.shape[1:], array.stride()[1:], strict=True)}
    return all(step in known for step, size in zip(array.stride(), array.shape, strict=True) if size > 1)


def _seen(tensor: FakeTensor) -> torch.device:
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    return SEEN if tensor.fake_device.type == "cuda" else tensor.fake_device


def _dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`FakeTensor.__torch_dispatch__`, which is asked inside the mode."""
    if func is torch.ops.prim.device.default:
        return _seen(args[0])
    return _fake_dispatch(cls, func, types, args, kwargs)


_fake_dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]


class Event:
    """Of a stream that never gets there, so that nobody may read what waits for it."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


def _is(kind: str) -> property:
    return property(lambda tensor: tensor.fake_device.type == kind)


PRODUCTS = {
    functional.linear, functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d,
    functional.conv_transpose2d, functional.conv_transpose3d, functional.scaled_dot_product_attention,
    Tensor.matmul, Tensor.__matmul__, torch.matmul, torch.bmm, torch.mm, torch.addmm, torch.baddbmm,
}  # fmt: skip
"""What autocast takes to bfloat16."""


class Autocast(TorchFunctionMode):
    """Stands for autocast's own casts, which torch does for devices alone that are there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and torch.is_autocast_enabled("cuda"):
            args, kwargs = tree_map(_short, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _short(value: Any) -> Any:
    castable = isinstance(value, Tensor) and value.is_cuda and value.is_floating_point()
    return value.to(torch.bfloat16) if castable else value


@contextmanager
def autocast() -> Iterator[None]:
    """`torch.autocast("cuda", torch.bfloat16)`."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        with Autocast():
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)


class SameThread:
    """Stands for a pool of threads, which would not know of the mode."""

    def __init__(self, threads: int) -> None: ...

    def __enter__(self) -> "SameThread":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def submit(self, function: Any, *args: Any) -> Any:
        return mock.Mock(result=lambda: function(*args))


MODE = Dry()
"""One for all, because what is cached holds its tensors."""


@contextmanager
def dry_gpu() -> Iterator[Work]:
    """Within this context "cuda" is a GPU that computes nothing. Yields what it was asked."""
    from triton.runtime.jit import JITFunction

    MODE.work, generator = Work(), torch.Generator()

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        MODE.launch(kernel, *args, **options)

    stand_ins = [
        (FakeTensor, "is_cuda", _is("cuda")),
        (FakeTensor, "is_cpu", _is("cpu")),
        (FakeTensor, "is_meta", _is("meta")),
        (FakeTensor, "get_device", lambda tensor: tensor.fake_device.index if tensor.is_cuda else -1),
        (FakeTensor, "data_ptr", lambda tensor: 0),
        (FakeTensor, "__torch_dispatch__", classmethod(_dispatch)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (device, "_multiprocessors", lambda _: 132),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_stream", lambda *_: None),
        (torch.cuda, "Event", Event),
        (torch.cuda, "Stream", lambda *_: None),
        (torch, "Generator", lambda *_: generator),
        (device, "dispatch_modes", lambda: 0),
        (device, "Tensor", FakeTensor),  # what is not a plain tensor would be traced
        (conv_gram, "Tensor", FakeTensor),
        (conv_geometry, "ThreadPoolExecutor", SameThread),
        (JITFunction, "run", run),
    ]
    with ExitStack() as stack:
        for place, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(place, name, stand_in, create=place is FakeTensor))
        stack.enter_context(MODE)
        yield MODE.work
