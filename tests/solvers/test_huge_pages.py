"""Large results on a CPU are written to huge pages, and are the same."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import proxprop
from proxprop import tuning
from proxprop.solvers import huge_pages, matmul
from proxprop.solvers.huge_pages import in_huge_pages

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists() and Path("/proc/self/smaps").exists()


def flags(address: int) -> list[str]:
    """The flags of the mapping that an address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, behind = (int(number, 16) for number in words[0].split("-"))
            inside = first <= address < behind
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise LookupError(hex(address))


def middle(array: Tensor) -> int:
    return array.data_ptr() + array.numel() * array.element_size() // 2


def backward(outputs: int) -> Tensor:
    """The direction of a layer with 4000 inputs."""
    layer = proxprop.nn.Linear(4000, outputs)
    layer(torch.randn(3, 4000)).sum().backward()
    return layer.weight.grad


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="no huge pages here, or no way to see them")
def test_the_direction_of_a_large_layer_is_in_huge_pages() -> None:
    assert "hg" in flags(middle(backward(outputs=2200)))


def test_nothing_is_asked_for_a_small_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "in_huge_pages", lambda array: pytest.fail("8 MB are not many"))
    backward(outputs=500)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [None, 1, 3])
def test_a_product_is_the_same_in_huge_pages(
    groups: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (300, 120) if groups is None else (groups, 300, 120)
    left, right = torch.randn(shape, dtype=dtype).mT, torch.randn(shape, dtype=dtype)
    expected = matmul.multiply(left, right)
    asked = []
    monkeypatch.setattr(matmul, "in_huge_pages", lambda array: asked.append(array) or array)
    monkeypatch.setattr(tuning, "HUGE_PAGE_LEAST_BYTES", expected.numel() * expected.element_size())
    found = matmul.multiply(left, right)
    assert [array.data_ptr() for array in asked] == [found.data_ptr()]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    monkeypatch.setattr(tuning, "HUGE_PAGE_LEAST_BYTES", expected.numel() * expected.element_size() + 1)
    matmul.multiply(left, right)
    assert len(asked) == 1


@pytest.mark.parametrize("offset", [0, 1, 7, mmap.PAGESIZE // 4])
def test_pages_shared_with_other_arrays_are_left_alone(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *about: asked.append(about))
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    array = torch.empty(offset + 5 * mmap.PAGESIZE)[offset:]
    assert in_huge_pages(array) is array
    [(first, size, advice)] = asked
    assert (first % mmap.PAGESIZE, size % mmap.PAGESIZE, advice) == (0, 0, 14)
    start, behind = array.data_ptr(), array.data_ptr() + 4 * array.numel()
    assert start <= first < start + mmap.PAGESIZE
    assert behind - mmap.PAGESIZE < first + size <= behind


def test_nothing_is_asked_of_other_systems_than_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: pytest.fail("there is no such function"))
    array = torch.empty(8)
    assert in_huge_pages(array) is array


def test_nothing_is_asked_for_a_compiled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "HUGE_PAGE_LEAST_BYTES", 0)
    monkeypatch.setattr(matmul, "in_huge_pages", lambda array: pytest.fail("this has no memory of its own"))
    left, right = torch.randn(4, 6), torch.randn(6, 5)
    compiled = torch.compile(matmul.multiply, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(left, right), left @ right)


def test_nothing_is_asked_under_a_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "HUGE_PAGE_LEAST_BYTES", 0)
    monkeypatch.setattr(matmul, "in_huge_pages", lambda array: pytest.fail("this has no memory of its own"))
    layer = proxprop.nn.Linear(6, 5)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(4, 6)).sum().backward()
    assert counter.get_total_flops() > 0
    assert layer.weight.grad is not None
