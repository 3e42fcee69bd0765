"""The directive `public-names`: everything in a module's `__all__`, first as a table, then with its docstring."""

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any

from docutils import nodes
from modules_described import home, names
from sphinx.application import Sphinx
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective


class PublicNames(SphinxDirective):
    """`.. public-names:: proxprop.nn`, in a page of reStructuredText."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A table of the names, then each of them."""
        module = import_module(self.arguments[0])
        listed = {name: home(module, name) for name in sorted(names(module), key=str.lower)}
        lines = [".. currentmodule:: None", "", ".. autosummary::", "   :nosignatures:", ""]
        lines += [f"   {where}.{name}" for name, where in listed.items() if not is_data(module, name)]
        for name, where in listed.items():
            if where == module.__name__ and not isinstance(getattr(module, name), ModuleType):
                lines += ["", *described(module, name)]
        return self.parse_text_to_nodes("\n".join(lines))


def is_data(module: ModuleType, name: str) -> bool:
    """Whether a name is a value, such as a constant or a type's other name."""
    value = getattr(module, name)
    return not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value))


def described(module: ModuleType, name: str) -> list[str]:
    """What has autodoc describe one name, under the name that users write."""
    full, value = f"{module.__name__}.{name}", getattr(module, name)
    if is_data(module, name):
        shown = f"   :value: {value!r}" if isinstance(value, str | tuple) else "   :type: type"
        return [f".. py:data:: {full}", shown, "", f"   {comment(module, name)}"]
    if inspect.isclass(value):
        left_out = ", ".join(["forward", "plain", *getattr(value, "_fields", ())])
        return [f".. autoclass:: {full}", "   :members:", f"   :exclude-members: {left_out}"]
    return [f".. autofunction:: {full}"]


def comment(module: ModuleType, name: str) -> str:
    """The string below a constant where it is defined; empty where there is none."""
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        try:
            found = ModuleAnalyzer.for_module(f"{module.__name__}.{info.name}").find_attr_docs()
        except PycodeError:
            continue
        if ("", name) in found:
            return " ".join(found["", name])
    return ""


SECTIONS = {"Args:", "Attributes:", "Example:", "Raises:", "Returns:", "Yields:"}


def literal_formulas(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Show an indented paragraph of a docstring as it is: it is a formula or a table, not a quotation.

    A blank first line keeps napoleon from taking a property's words before a colon for its type.
    """
    found: list[str] = [""] if what == "property" else []
    above = ""
    for line in lines:
        indented = line.startswith("    ")
        if (
            indented
            and found
            and not found[-1].strip()
            and not above.startswith(" ")
            and above not in SECTIONS
        ):
            found += ["::", ""]
        found.append(line)
        above = line if line.strip() else above
    lines[:] = found


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive, and prepare docstrings before napoleon reads their sections."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", literal_formulas, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
