"""Plant each bug of the corpus in a copy of the sources, and check that it is caught.

    python -m tests.planted.run                     # all, on all cores
    python -m tests.planted.run NAME NAME --json

First, the bugs' tests run without any bug. A bug is caught by its unit tests or within 1,000 seeds
of its modes of simulation. Prints a line per bug: what caught it, and after how many seconds.
Ends with exit code 1 if a bug was not caught.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.planted.corpus import Bug, bugs

ROOT = Path(__file__).parents[2]
SEEDS = 1000
STRIDE = 50  # seeds per process: later ones do not run after a failure
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
MODES = {  # mode of simulation -> options
    "plain": ["--mode", "plain", "--nodes", "4"],
    "mesh": ["--mode", "mesh", "--nodes", "12"],
    "endpoint": ["--mode", "mesh", "--nodes", "12", "--through", "endpoint"],
    "real": ["--mode", "mesh", "--nodes", "12", "--replicas", "real"],
    "links": ["--mode", "links", "--nodes", "4"],
    "links-mesh": ["--mode", "links-mesh", "--nodes", "8"],
}
COPIED = ("sparkstrom", "tests", "benchmarks", "examples", "docs", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one bug. ``by``: a test file or seeds; None: nothing has caught the bug."""

    name: str
    by: str | None
    seconds: float


def main() -> int:
    """Judge all bugs, or the named ones."""
    args = arguments()
    tests = sorted({path for bug in args.bugs for path in bug.tests})
    if tests and not passes([*PYTEST, *tests], ROOT):
        sys.exit("some of these tests fail without any bug: " + ", ".join(tests))
    found = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for verdict in pool.map(judge, args.bugs):
            found += verdict.by is not None
            print(json.dumps(asdict(verdict)) if args.json else line(verdict), flush=True)
    print(f"{found} of {len(args.bugs)} were caught", file=sys.stderr)
    return int(found < len(args.bugs))


def arguments() -> argparse.Namespace:
    """Parse the options; end the program if a name is unknown."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="of bugs; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="one object per line")
    args = parser.parse_args()
    known = {bug.name: bug for bug in bugs()}
    if unknown := {*args.names} - known.keys():
        parser.error(f"no such bug: {', '.join(sorted(unknown))}")
    args.bugs = [known[name] for name in args.names or known]
    return args


def line(verdict: Verdict) -> str:
    """Format a verdict for people."""
    return f"{verdict.name:50} {verdict.by or 'NOT CAUGHT'} ({verdict.seconds:.1f} s)"


def judge(bug: Bug) -> Verdict:
    """Plant the bug in a copy of the sources, and run its checks until one fails."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / name)
        bug.plant(root)
        by = next((what for what, command in checks(bug) if not passes(command, root)), None)
    return Verdict(bug.name, by, round(time.monotonic() - began_s, 1))


def checks(bug: Bug) -> Iterator[tuple[str, list[str]]]:
    """Yield commands that fail if they see the bug, quick ones first."""
    for path in bug.tests:
        yield path, [*PYTEST, path]
    for first in range(0, SEEDS, STRIDE):
        for mode in bug.modes:
            seeds = f"{first}:{first + STRIDE}"
            options = [*MODES[mode], "--seeds", seeds, "--jobs", "1"]
            command = ["-m", "sparkstrom.cli.main", "simulate", *options, "--no-shrink", "--json"]
            yield f"{mode} {seeds}", command


def passes(command: list[str], root: Path) -> bool:
    """Return whether the command succeeds below this root; raise if it could not run."""
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env=env, capture_output=True, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr).decode()[-2000:]}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
