"""Tests of scripts/test: its exit code is 0 if all its runs of pytest succeed, else theirs.

The script is the real one, with an environment that installs nothing and a fake ``python`` that
answers in place of pytest with the status that a test has set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pyspark_folder import VARIABLE, write_path_file

ROOT = Path(__file__).parents[2]
NO_CACHE = "no:cacheprovider"

PYTHON = """#!/bin/sh
case "$*" in
    *tests.pyspark_folder*) exit "${FAILS_PATH_FILE:-0}" ;;
    *--collect-only*) exit ;;
    *tests.java_archives*)
        [ -z "${FAILS_ARCHIVES:-}" ] && echo "-Xarchive '-Da=b c' '-Dd=e'"; exit ;;
    *--ignore=tests/gpu*) leg=first ;;
    *--backwards*) leg=backwards ;;
    *--claims*) leg=forwards ;;
    *) leg=together ;;
esac
echo "ran $leg"
echo "$leg ${SPARK_SUBMIT_OPTS:-} for daemons: ${SPARK_DAEMON_JAVA_OPTS:-}" >>options
case " ${FAILS:-} " in *" $leg "*) exit "$STATUS" ;; esac
"""


ENVIRONMENT = """cd "$(dirname "$0")/.."
install() { :; }
say() { echo "$*" >&2; }
"""


def run_script(at: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
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
    """Return the legs that ran; cluster tests run as two halves or, where they cannot, together."""
    legs = set(done.stdout.split()) - {"ran"}
    return legs - {"together"} | {"forwards", "backwards"} if "together" in legs else legs


def test_script_exits_with_zero_if_all_legs_succeed(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--all")
    assert ran(done) == {"first", "forwards", "backwards"}
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("legs", ["first", "forwards together", "backwards together"])
def test_failed_leg_fails_script_and_other_legs_run(legs: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, FAILS=legs, STATUS="1")
    assert (done.returncode, ran(done)) == (1, {"first", "forwards", "backwards"})


@pytest.mark.parametrize(
    ("variables", "given", "of_daemons"),
    [({}, "-Xarchive '-Da=b c' '-Dd=e'", "-Xarchive"), ({"FAILS_ARCHIVES": "1"}, "", "")],
)
def test_jvms_use_class_archives_if_available(
    variables: dict[str, str], given: str, of_daemons: str, tmp_path: Path
) -> None:
    done = run_script(tmp_path, "--all", **variables)
    assert ran(done) == {"first", "forwards", "backwards"}
    lines = (tmp_path / "options").read_text().splitlines()
    options = dict(line.split(" ", 1) for line in lines)
    assert set(options.values()) == {f"{given} for daemons: {of_daemons}"}
    assert ("JVMs start slowly" in done.stderr) == (not given)


def test_script_warns_and_runs_without_path_file(
    tmp_path: Path,
) -> None:
    done = run_script(tmp_path, "--all", FAILS_PATH_FILE="1")
    assert ran(done) == {"first", "forwards", "backwards"}
    assert done.returncode == 0
    assert "Python workers start slowly" in done.stderr


def test_path_file_removes_only_spark_archives_from_path(
    tmp_path: Path,
) -> None:
    write_path_file(tmp_path)
    lib = tmp_path / "pyspark/python/lib"
    lib.mkdir(parents=True)
    for archive in ("pyspark.zip", "own.zip"):
        (lib / archive).touch()
    mine, theirs = tmp_path / "own.zip", [str(lib / "pyspark.zip"), "/pyspark/jars/spark-core.jar"]
    program = f"""import site, sys
site.addsitedir({str(tmp_path)!r})
theirs = set({theirs})
print(*({{*theirs, {str(mine)!r}}} & {{*sys.path}}), *(theirs & {{*sys.path_importer_cache}}))
"""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(mine), *theirs]), VARIABLE: "1"}
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(mine)]


def test_interrupted_first_leg_ends_script(tmp_path: Path) -> None:
    """An interrupted first leg ends the script with its status; no other leg runs."""
    done = run_script(tmp_path, FAILS="first", STATUS="2")
    assert (done.returncode, ran(done)) == (2, {"first"})


def test_arguments_are_passed_to_single_pytest_run(tmp_path: Path) -> None:
    """Arguments are passed to a single run of pytest."""
    done = run_script(tmp_path, "tests/unit", FAILS="together", STATUS="5")
    assert (done.returncode, done.stdout) == (5, "ran together\n")


def test_each_file_runs_once_among_runs_with_same_claims(tmp_path: Path) -> None:
    """Each file runs in only one of several runs with the same directory of claims."""
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("def test_1(): ...\ndef test_2(): ...\n")
    claims = tmp_path / "claims"
    (claims / "test_b.py").mkdir(parents=True)  # claimed by another run

    def ran_in_order(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.conftest", "-p", NO_CACHE]
        command += [f"--rootdir={tmp_path}", f"--claims={claims}", *options, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return re.findall(r"(\w)\.py::test_(\d) PASSED", done.stdout)

    assert ran_in_order() == [("a", "1"), ("a", "2"), ("c", "1"), ("c", "2")]
    assert ran_in_order() == []
    shutil.rmtree(claims)
    claims.mkdir()
    assert "".join(map("".join, ran_in_order("--backwards"))) == "c1c2b1b2a1a2"
