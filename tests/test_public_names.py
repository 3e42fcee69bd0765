"""The public names: what there is, and that no name is two things."""

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Literal, get_args, get_origin

import pytest

import proxprop
from proxprop.deferred.attaching import FALLBACKS, Fallback
from proxprop.settings import SCALINGS, Scaling, Space
from proxprop.solvers import SPACES


@pytest.mark.parametrize("package", ["proxprop", "proxprop.nn", "proxprop.deferred"])
def test_no_public_name_shadows_a_submodule(package: str) -> None:
    module = importlib.import_module(package)
    submodules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    public = {name: getattr(module, name) for name in module.__all__}
    assert public
    shadowed = {n for n, value in public.items() if n in submodules and not isinstance(value, ModuleType)}
    assert shadowed == set()


def test_the_public_names_are_these() -> None:
    assert set(proxprop.__all__) == {
        *("convert", "revert", "summary", "register", "unregister", "nn", "diagnostics", "use_cuda_graphs"),
        *("attach", "wrap", "Attached", "Running", "CG", "Exact", "Solver"),
        *("bound", "Bounded"),
    }
    for gone in ("solve", "detach", "Settings"):
        assert not hasattr(proxprop, gone)


def test_the_handle_offers_what_the_documents_say() -> None:
    assert inspect.signature(proxprop.attach).return_annotation is proxprop.Attached
    for name in ("solve", "detach", "state_dict", "load_state_dict", "bytes_sent", "bytes_held"):
        assert getattr(proxprop.Attached, name).__doc__


@pytest.mark.parametrize(
    ("accepted", "written"), [(Space, SPACES), (Scaling, SCALINGS), (Fallback, FALLBACKS)], ids=str
)
def test_types_of_options_name_what_is_accepted(accepted: object, written: tuple[str, ...]) -> None:
    assert get_origin(accepted) is Literal
    assert get_args(accepted) == written


def test_defaults_of_running_averages() -> None:
    expected = {"decay": 0.95, "update_every": 10, "invert_every": 10, "damping": 0.3, "power": 1.0}
    expected |= {"rows": None, "inverse_dtype": None, "block": None, "copies": 2.0**26}
    found = inspect.signature(proxprop.Running).parameters
    assert {name: parameter.default for name, parameter in found.items()} == expected
