"""Every command that a page shows could be given: its program, file, target and options are there."""

import ast
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from proxprop.lab.cli import build
from proxprop.lab.config import Config

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "results/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = "proxprop", "make", "python", "torchrun", "nox", "pip"
STANDING_FOR_MORE = re.compile(r"[…{]|\b(NAME|N|TASK)\b")
"""What a command has in a place where a reader puts something of their own."""


def shown(text: str) -> set[str]:
    """The commands in a page's code: lines of blocks, and what stands between backticks."""
    fenced = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in fenced for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    found = {line.partition(" #")[0].partition(" > ")[0].strip() for line in lines}
    return {line for line in found if line.split(" ")[0] in PROGRAMS and " " in line}


MISTAKE: Any = typer.BadParameter.__base__
"""What typer raises for a command line that it does not understand; some versions bring a click of their own."""

COMMANDS = sorted(set().union(*(shown(page.read_text()) for page in PAGES)))
COMPLETE = [command for command in COMMANDS if not STANDING_FOR_MORE.search(command)]


def of(program: str) -> list[list[str]]:
    return [shlex.split(command)[1:] for command in COMPLETE if command.startswith(f"{program} ")]


def check_proxprop(arguments: list[str]) -> None:
    """Parse as the real command does, without running it."""
    group: Any = typer.main.get_command(build())
    command = group.commands[arguments[0]]
    command.make_context(arguments[0], arguments[1:])


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(arguments) <= set(targets)


def check_script(arguments: list[str]) -> None:
    """A script or a module, and the options that it defines."""
    while arguments[0].startswith("--"):  # torchrun's own
        arguments = arguments[1:]
    if arguments[0] == "-m":
        arguments = ["src/" + arguments[1].replace(".", "/") + ".py", *arguments[2:]]
    path = ROOT / arguments[0]
    shared = path.with_name("arguments.py")  # what two modules of the lab parse with
    texts = [file.read_text() for file in (path, shared) if file == path or file.exists()]
    known = {
        argument.value
        for text in texts
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument")
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }
    assert {option for option in arguments[1:] if option.startswith("--")} <= known


def check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for name in re.findall(r"\[(.*)\]", " ".join(arguments)):
        assert set(name.split(",")) <= set(extras)


def check_nox(arguments: list[str]) -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    sessions = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert arguments[0] == "-s"
    assert set(arguments[1:]) <= sessions


@pytest.mark.parametrize("arguments", of("proxprop"), ids=" ".join)
def test_a_command_line_of_proxprop_parses(arguments: list[str]) -> None:
    check_proxprop(arguments)


@pytest.mark.parametrize("arguments", of("make"), ids=" ".join)
def test_make_has_the_target(arguments: list[str]) -> None:
    check_make(arguments)


OTHERS = [["-m", "build"]]
SCRIPTS = [arguments for arguments in of("python") + of("torchrun") if arguments not in OTHERS]


@pytest.mark.parametrize("arguments", SCRIPTS, ids=" ".join)
def test_a_script_is_there_and_has_the_options(arguments: list[str]) -> None:
    check_script(arguments)


@pytest.mark.parametrize("arguments", of("pip"), ids=" ".join)
def test_pip_knows_the_extras(arguments: list[str]) -> None:
    check_pip(arguments)


@pytest.mark.parametrize("arguments", of("nox"), ids=" ".join)
def test_nox_has_the_session(arguments: list[str]) -> None:
    check_nox(arguments)


@pytest.mark.parametrize(
    ("check", "command"),
    [
        (check_proxprop, "train --learning-rates 1"),
        (check_proxprop, "practise"),
        (check_make, "tea"),
        (check_script, "benchmarks/gone.py"),
        (check_script, "benchmarks/bounds.py run --tasks digits"),
        (check_script, "-m proxprop.lab.reproduction.spectrum --gone 1"),
        (check_pip, "install '.[gone]'"),
        (check_nox, "-s gone"),
    ],
)
def test_a_command_that_could_not_be_given_is_noticed(check: Any, command: str) -> None:
    with pytest.raises((AssertionError, KeyError, OSError, MISTAKE)):
        check(shlex.split(command))


def test_commands_are_found() -> None:
    page = "```\nmake demo     # a picture\n```\nor `python a.py\n--b` and `proxprop`\n"
    assert shown(page) == {"make demo", "python a.py --b"}
    assert {command.split(" ")[0] for command in COMPLETE} == set(PROGRAMS)


def test_every_key_of_a_settings_file_is_known() -> None:
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert blocks
    for block in blocks:
        Config(**tomllib.loads(block))
