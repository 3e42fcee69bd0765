"""The project's checks on every Python there is: `nox`, or one of them, `nox -s types`, `nox -s tests-3.12`.

`make check` runs the same on one Python, in an environment that stays. Here each session has its own.
"""

import nox

PYTHONS = ["3.11", "3.12", "3.13"]
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "tests", "package"]


def install(session: nox.Session, extra: str) -> None:
    """The package with an extra, in the versions that are pinned."""
    session.install("--constraint", "constraints.txt", "--editable", f".[{extra}]")


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint, which need no torch."""
    session.install("--constraint", "constraints.txt", "ruff")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Types of src, as each of the Pythons reads them."""
    install(session, "dev")
    for version in PYTHONS:
        session.run("mypy", "--python-version", version)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests of `make test`; arguments behind `--` go to pytest."""
    install(session, "dev")
    session.run("pytest", "-m", "not slow", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=PYTHONS)
def record(session: nox.Session) -> None:
    """The same tests, written into results/versions.json, of which docs/releasing.md makes its table."""
    install(session, "dev")
    session.run("python", "tests/versions_record.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=PYTHONS)
def package(session: nox.Session) -> None:
    """Build sdist and wheel, check what they say of themselves, and try the wheel as a user would."""
    session.install("--constraint", "constraints.txt", "build", "twine")
    session.run("python", "-c", "import shutil; shutil.rmtree('dist', ignore_errors=True)")
    session.run("python", "-m", "build", "--quiet")
    session.run("python", "-m", "twine", "check", "--strict", "dist/proxprop-*")
    session.run("python", "tests/package_check.py")
