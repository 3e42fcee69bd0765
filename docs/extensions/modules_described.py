"""The modules that the reference describes, and which names of each are public."""

import inspect
from importlib import import_module
from types import ModuleType

MODULES = (
    "proxprop",
    "proxprop.nn",
    "proxprop.diagnostics",
    "proxprop.solvers",
    "proxprop.integrations.huggingface",
    "proxprop.integrations.lightning",
)


def names(module: ModuleType) -> list[str]:
    """What a module makes public: its `__all__`, or what it defines under a name without an underscore."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def home(module: ModuleType, name: str) -> str:
    """The module under which a name is described: `proxprop` where it is public there as well."""
    package = import_module(module.__name__.partition(".")[0])
    return package.__name__ if name in package.__all__ else module.__name__


def anchors() -> set[str]:
    """The anchor of every public name in the built reference."""
    found = set()
    for module in map(import_module, MODULES):
        for name in names(module):
            full = f"{home(module, name)}.{name}"
            found.add(f"module-{full}" if inspect.ismodule(getattr(module, name)) else full)
    return found
