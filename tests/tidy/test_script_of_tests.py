"""scripts/test ends with 0 where all of its runs of pytest did, and with what failed otherwise.

The script is the real one, beside an environment that installs nothing and a `python` that answers
for pytest: what it is asked to run decides how it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/sh
case "$*" in
    *tests.java_archives*) [ -z "${FAILS_ARCHIVES:-}" ] && echo -Xarchive; exit ;;
    *--ignore=tests/gpu*) leg=first ;;
    *--ignore=tests/integration/spark*) leg=apart ;;
    *tests/gpu*) leg=together ;;
    *) leg=spark ;;
esac
echo "ran $leg"
echo "$leg ${SPARK_SUBMIT_OPTS:-}" >>options
case " ${FAILS:-} " in *" $leg "*) exit "$STATUS" ;; esac
"""


ENVIRONMENT = """cd "$(dirname "$0")/.."
install() { :; }
say() { echo "$*" >&2; }
"""


def run(at: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    scripts = at / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts/test", scripts)
    (scripts / "environment").write_text(ENVIRONMENT)
    (at / "bin").mkdir()
    (at / ".venv").mkdir()
    (at / "bin/python").write_text(PYTHON)
    (at / "bin/python").chmod(0o755)
    environment = {"PATH": f"{at / 'bin'}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        [scripts / "test", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def ran(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Legs that were run; clusters' tests run as two halves or, where they cannot, together."""
    legs = set(done.stdout.split()) - {"ran"}
    return legs - {"together"} | {"spark", "apart"} if "together" in legs else legs


def test_nothing_failed(tmp_path: Path) -> None:
    done = run(tmp_path, "--all")
    assert ran(done) == {"first", "spark", "apart"}
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("legs", ["first", "spark together", "apart together"])
def test_a_failed_leg_fails_all_and_the_others_run(legs: str, tmp_path: Path) -> None:
    done = run(tmp_path, FAILS=legs, STATUS="1")
    assert (done.returncode, ran(done)) == (1, {"first", "spark", "apart"})


@pytest.mark.parametrize(("variables", "given"), [({}, "-Xarchive"), ({"FAILS_ARCHIVES": "1"}, "")])
def test_jvms_use_the_archives_that_could_be_made(
    variables: dict[str, str], given: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "--all", **variables)
    assert ran(done) == {"first", "spark", "apart"}
    lines = (tmp_path / "options").read_text().splitlines()
    options = dict(line.split(" ", 1) for line in lines)
    assert options.pop("first") == ""
    assert set(options.values()) == {given}
    assert ("JVMs start slowly" in done.stderr) == (not given)


def test_an_interrupted_first_leg_ends_all(tmp_path: Path) -> None:
    done = run(tmp_path, FAILS="first", STATUS="2")
    assert (done.returncode, ran(done)) == (2, {"first"})


def test_what_is_named_is_handed_on(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/unit", FAILS="spark", STATUS="5")
    assert (done.returncode, done.stdout) == (5, "ran spark\n")
