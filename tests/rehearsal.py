"""Rehearse a release without a host: `make rehearsal` takes steps 3, 4 and 9 to 11 of docs/releasing.md.

A bare clone stands in for the repository's host, and an index on 127.0.0.1 for the package index. The commit of this
checkout gets its version and a tag, which is pushed. What is built from the tag is uploaded and installed by its name
beside torch alone, README's ten lines run, and a branch gets the next version. All of it is in a folder that is thrown away.
"""

import argparse
import datetime
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from package_check import ROOT, Environment

SECONDS = 600
"""The longest time for one command."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--next", default="0.3.0.dev0", help="the version after the release")
    options = parser.parse_args()
    changed = run("git", "status", "--porcelain", cwd=ROOT)
    assert not changed, f"only what is committed is rehearsed, and these files are not:\n{changed}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkout = clone(folder)
        version = version_of(checkout).partition(".dev")[0]
        release(checkout, version, datetime.date.today())
        publish(checkout, version)
        with index(folder) as address:
            upload(checkout, address)
            install(folder, address, version)
        set_version(checkout, options.next)
        run("git", "commit", "--quiet", "--all", "--message", f"Begin {options.next}", cwd=checkout)
        run("git", "push", "--quiet", "origin", "HEAD:refs/heads/next", cwd=checkout)
    print(f"the next version is {options.next}; nothing left this machine")


def run(*command: str, cwd: Path) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def clone(folder: Path) -> Path:
    """A checkout of this commit, whose remote is a bare clone."""
    run("git", "clone", "--quiet", "--bare", str(ROOT), "remote.git", cwd=folder)
    run("git", "clone", "--quiet", "remote.git", "checkout", cwd=folder)
    checkout = folder / "checkout"
    run("git", "checkout", "--quiet", "--detach", run("git", "rev-parse", "HEAD", cwd=ROOT), cwd=checkout)
    for key, value in {"user.name": "rehearsal", "user.email": "rehearsal@localhost"}.items():
        run("git", "config", key, value, cwd=checkout)
    return checkout


def version_of(checkout: Path) -> str:
    """The version that the package of a checkout names."""
    (found,) = re.findall(r'^__version__ = "(.*)"$', package(checkout).read_text(), re.MULTILINE)
    return str(found)


def package(checkout: Path) -> Path:
    return checkout / "src" / "proxprop" / "__init__.py"


def set_version(checkout: Path, version: str) -> None:
    """Put a version into both files that name one."""
    for path, before, after in (
        (package(checkout), r'^__version__ = ".*"$', f'__version__ = "{version}"'),
        (checkout / "CITATION.cff", r"^version: .*$", f"version: {version}"),
    ):
        text, found = re.subn(before, after, path.read_text(), flags=re.MULTILINE)
        assert found == 1, f"{path.name} should name its version once, and does so {found} times"
        path.write_text(text)


def name_changes(checkout: Path, version: str, day: datetime.date) -> None:
    """What was unreleased belongs to a version, and a new [Unreleased] begins."""
    path = checkout / "CHANGELOG.md"
    heading = "## [Unreleased]\n"
    before, found, after = path.read_text().partition(heading)
    assert found, f"CHANGELOG.md should have a line {heading!r}"
    path.write_text(f"{before}{heading}\n## [{version}] - {day.isoformat()}\n{after}")


def release(checkout: Path, version: str, day: datetime.date) -> None:
    """Steps 3 and 4: the commit that is released."""
    name_changes(checkout, version, day)
    set_version(checkout, version)
    run("git", "commit", "--quiet", "--all", "--message", f"Release {version}", cwd=checkout)
    print(f"version {version}: {run('git', 'diff', '--shortstat', 'HEAD~1', cwd=checkout)}")


def publish(checkout: Path, version: str) -> None:
    """Step 9: a tag on the remote, signed where git has a key."""
    has_key = subprocess.run(
        ["git", "config", "user.signingkey"], cwd=checkout, capture_output=True, check=False
    )
    kind = "--annotate" if has_key.returncode else "--sign"
    run("git", "tag", kind, f"v{version}", "--message", f"proxprop {version}", cwd=checkout)
    run("git", "push", "--quiet", "origin", f"v{version}", cwd=checkout)
    assert f"refs/tags/v{version}" in run("git", "ls-remote", "--tags", "origin", cwd=checkout)
    print(
        f"tag v{version} pushed, {'signed' if kind == '--sign' else 'unsigned: git has no user.signingkey'}"
    )


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """The address of an empty package index on this machine, which takes uploads from anyone."""
    (folder / "index").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    anyone = "--passwords", ".", "--authenticate", "."
    command = [sys.executable, "-m", "pypiserver", "run", "--interface", "127.0.0.1", "--port", port]
    with (folder / "index.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--disable-fallback", *anyone, "index"], cwd=folder, stdout=log, stderr=log
        )
        try:
            address = f"http://127.0.0.1:{port}/"
            wait_for(address)
            yield address
        finally:
            server.terminate()
            server.wait()


def wait_for(address: str, seconds: float = 30.0) -> None:
    """Return when a server answers."""
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def upload(checkout: Path, address: str) -> None:
    """Step 10, first half: sdist and wheel of the tag, each uploaded once."""
    run(sys.executable, "-m", "build", "--quiet", cwd=checkout)
    files = sorted(str(path) for path in (checkout / "dist").iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=checkout)
    somebody = "--username", "anyone", "--password", "anything"
    command = (
        sys.executable,
        "-m",
        "twine",
        "upload",
        "--non-interactive",
        "--repository-url",
        address,
        *somebody,
    )
    run(*command, *files, cwd=checkout)
    again = subprocess.run([*command, *files], cwd=checkout, capture_output=True, text=True, check=False)
    assert again.returncode != 0, "an index should refuse to replace a file"
    print(f"uploaded {', '.join(Path(path).name for path in files)}; a second upload is refused")


def install(folder: Path, address: str, version: str) -> None:
    """Step 10, second half: the package by its name from that index alone, beside torch alone."""
    environment = Environment(folder)
    environment.install("torch")
    options = "--isolated", "--quiet", "--disable-pip-version-check", "--index-url", f"{address}simple/"
    environment.run("python", "-m", "pip", "install", *options, f"proxprop=={version}")
    found = environment.run("python", "-W", "ignore", "-c", "import proxprop; print(proxprop.__version__)")
    assert found.strip() == version, found
    environment.ten_lines()
    print(f"pip install proxprop=={version} from the index, beside torch alone: README's ten lines run")


if __name__ == "__main__":
    main()
