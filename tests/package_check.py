"""Try what `python -m build` left in dist/ as a user would, in environments of their own: `python tests/package_check.py`.

The wheel goes into an empty environment with torch alone: README's ten lines run, and mypy reads the package's types.
Then `[lab]` is added, and the command `proxprop` trains and reports. It needs an index for torch and for `[lab]`.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = str(ROOT / "constraints.txt")
MOST_BYTES = {"whl": 1_000_000, "gz": 10_000_000}
WRONG = "import proxprop, torch\nproxprop.wrap(torch.nn.Linear(1, 1), 'model')\n"
COMPARE = (
    "compare --solvers backprop,cg:3 --optimizers sgd --lrs 0.1 --epochs 1 --seeds 1 --jobs 1 --out report"
)


def main() -> None:
    wheel, sdist = built("whl"), built("gz")
    check_contents(names_in_wheel(wheel), names_in_sdist(sdist))
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder))
        environment.install(str(wheel))
        others = sorted(environment.installed() & {"numpy", "matplotlib", "typer", "transformers", "triton"})
        print(f"with torch alone; beside it, of what proxprop can use, torch brought: {others or 'nothing'}")
        environment.ten_lines()
        environment.refuses_the_command()
        environment.types()
        environment.install(f"{wheel}[lab]")
        environment.run("proxprop", *COMPARE.split())
    print("the wheel works with torch alone, is typed, and has its command with [lab]")


def built(suffix: str) -> Path:
    """The one file of a kind in dist/."""
    (found,) = (ROOT / "dist").glob(f"*.{suffix}")
    size = found.stat().st_size
    assert size < MOST_BYTES[suffix], f"{found.name} has {size:,} bytes, more than {MOST_BYTES[suffix]:,}"
    print(f"{found.name}: {size:,} bytes")
    return found


def names_in_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def names_in_sdist(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def check_contents(wheel: set[str], sdist: set[str]) -> None:
    """A wheel is the package alone; an sdist has what a test run and the documents need."""
    assert {"proxprop/py.typed", "proxprop/lab/paper/curves.csv", "proxprop_cli.py"} <= wheel
    strangers = {name for name in wheel if not re.match(r"proxprop(/|_cli\.py|-[\w.]+\.dist-info/)", name)}
    assert not strangers, strangers
    tracked = subprocess.run(
        ["git", "ls-files", "src", "tests", "docs", "examples", "benchmarks", "*.md", "*.toml", "*.txt"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    missing = {name for name in tracked if (ROOT / name).exists()} - sdist
    assert not missing, f"the sdist lacks {sorted(missing)}"
    assert "results/paper/fig1.csv" in sdist
    assert not any(name.startswith((".venv", "out/", "dist/")) for name in sdist)


class Environment:
    """A virtual environment that is thrown away, and the folder it is in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)

    def call(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands outside the checkout, without what the caller has on its path."""
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")}
        command = [str(self.folder / "venv" / "bin" / name), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=clean, capture_output=True, text=True, check=False
        )

    def run(self, name: str, *arguments: str) -> str:
        done = self.call(name, *arguments)
        assert done.returncode == 0, f"{name} {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def install(self, *what: str) -> None:
        quiet = ("--quiet", "--disable-pip-version-check", "--constraint", CONSTRAINTS)
        self.run("python", "-m", "pip", "install", *quiet, *what)

    def installed(self) -> set[str]:
        lines = self.run("python", "-m", "pip", "list", "--format", "freeze").splitlines()
        return {line.partition("==")[0] for line in lines}

    def ten_lines(self) -> None:
        """README's first block of Python."""
        block = re.findall(
            r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
        )[0]
        assert "Linear  16,640" in self.run("python", "-c", block)
        where = self.run("python", "-c", "import proxprop; print(proxprop.__file__)")
        assert str(self.folder) in where, where

    def refuses_the_command(self) -> None:
        """Without [lab] the command says what to install."""
        done = self.call("proxprop", "doctor")
        assert done.returncode != 0
        assert "lab" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr

    def types(self) -> None:
        """A user's mypy reads the types of the installed package, in the examples and in a mistake."""
        self.install("mypy")
        examples = [*map(str, sorted((ROOT / "examples").glob("*.py")))]
        self.run("mypy", "--ignore-missing-imports", *examples)
        (self.folder / "wrong.py").write_text(WRONG)
        done = self.call("mypy", "wrong.py")
        assert done.stdout.count("[arg-type]") == 2, done.stdout


if __name__ == "__main__":
    sys.exit(main())
