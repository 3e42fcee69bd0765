"""The directive `command-line`: every command and option of `proxprop`, read from the application itself."""

import re
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from proxprop.lab.cli import build


class CommandLine(SphinxDirective):
    """`.. command-line::`, in a page of reStructuredText."""

    def run(self) -> list[nodes.Node]:
        """A section for each command."""
        group = typer.main.get_command(build())
        sections = []
        for name, command in group.commands.items():
            context = command.make_context(name, [], resilient_parsing=True)
            section = nodes.section(ids=[f"proxprop-{name}"])
            section += nodes.title("", "", nodes.literal("", f"proxprop {name}"))
            section += self.parse_text_to_nodes(prose(command.help))
            section += self.parse_text_to_nodes("\n".join(options(command, context)))
            self.state.document.note_explicit_target(section)
            sections.append(section)
        return sections


def prose(text: str) -> str:
    """A command's help: paragraphs as they are, what is indented below them as code."""
    lines = text.replace("\b", "").splitlines()
    found: list[str] = []
    for above, line in zip(["", *lines], lines, strict=False):
        if line.startswith("    ") and not above.startswith("    "):
            found += ["", ".. code-block:: sh", ""]
        found.append(line if line.startswith("    ") else marked(line))
    return "\n".join(found)


def options(command: Any, context: Any) -> list[str]:
    """A definition for each argument and option."""
    lines = []
    for parameter in command.params:
        shown, text = parameter.get_help_record(context) or (
            parameter.human_readable_name,
            parameter.help or "",
        )
        lines += [f"``{shown}``", f"   {marked(' '.join(text.split()))}", ""]
    return lines


def marked(text: str) -> str:
    """Text in which options look like options."""
    return re.sub(r"(?<!\S)--[a-z-]+", r"``\g<0>``", text.replace("*", r"\*"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
