"""Measure records again: run the command that each of them names, and replace it by what comes out.

    python benchmarks/again.py results/bench/h200-ways-*.json
    python benchmarks/again.py --seconds 540 results/bench/*h200*.json    # begin nothing new after nine minutes

A record is replaced only if its command ends well, so nothing is lost to one that fails or is stopped. Records of the
present commit are skipped, so the same command continues where time ran out; the others are measured in the order in
which they are named. The commit comes from git, or from the environment variable COMMIT where there is no repository.
Needs torch alone; PYTHONPATH=src where proxprop is not installed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from step import current_commit

ROOT = Path(__file__).parents[1]
OUTPUT = {"step.py": "--out", "ablation.py": "--out", "deferred.py": "--json", "pieces.py": "--json"}
"""The option by which each benchmark is told where to write."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path, help="of results/bench")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so many")
    parser.add_argument("--anyway", action="store_true", help="measure records of the present commit too")
    options = parser.parse_args()
    start, failed = time.monotonic(), list[Path]()
    due = [path for path in options.records if options.anyway or not is_of(current_commit(), path)]
    for number, path in enumerate(due, 1):
        if time.monotonic() - start > options.seconds:
            print(f"time is up: {len(due) - number + 1} records are left as they were")
            break
        print(f"[{number}/{len(due)}] {path}", flush=True)
        if not measure(path):
            print(f"{path}: its command failed, and the record is left as it was", file=sys.stderr)
            failed.append(path)
    return 1 if failed else 0


def is_of(commit: str, path: Path) -> bool:
    """Whether a record was measured at this commit; False where no commit is known."""
    measured = json.loads(path.read_text()).get("environment", {}).get("commit", "")
    return bool(commit and measured) and (commit.startswith(measured) or measured.startswith(commit))


def measure(path: Path) -> bool:
    """Run a record's command and replace the record; whether that went well."""
    command, environment = parts(json.loads(path.read_text())["command"])
    if Path(command[0]).name not in OUTPUT:
        raise SystemExit(f"{path}: its command should be one of {', '.join(OUTPUT)} but is {command[0]}")
    new = path.with_name(path.name + ".new")
    told = [sys.executable, *command, OUTPUT[Path(command[0]).name], str(new.absolute())]
    try:
        done = subprocess.run(told, cwd=ROOT, env=os.environ | environment, check=False)
        if done.returncode or not new.exists():
            return False
        new.replace(path)
        return True
    finally:
        new.unlink(missing_ok=True)


def parts(command: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command, and the variables that are set in front of it.

    Example:
        >>> parts("THREADS=1 benchmarks/step.py --rounds 3")
        (['benchmarks/step.py', '--rounds', '3'], {'THREADS': '1'})
    """
    words, environment = shlex.split(command), {}
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    return words, environment


if __name__ == "__main__":
    sys.exit(main())
