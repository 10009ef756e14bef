"""Tests of docs/quickstart.md: its program runs as it is printed there.

README.md's program runs in tests/package/test_distributions.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGE = ROOT / "docs/quickstart.md"
# As in conf/laptop.conf: a JVM for short programs, with little compilation.
JVM = {"JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
SAYS = re.compile(r"^print\(.*\)  # (True)", re.MULTILINE)


def program() -> str:
    """Return the page's Python blocks, concatenated."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M))


def test_readme_has_at_most_150_lines() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_examples_extra_has_imports_of_quickstart() -> None:
    """The extra "examples", which `scripts/quickstart` installs, has scikit-learn and pandas."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {re.split(r"[<>=]", each)[0] for each in extras["examples"]}
    assert {"scikit-learn", "pandas"} <= named
    assert "pip install '.[spark,torch,examples]'" in README.read_text()
    assert "install examples" in (ROOT / "scripts/quickstart").read_text()


@pytest.mark.slow
def test_quickstart_program_prints_promised_results(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program())
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | JVM | {"PYTHONPATH": str(ROOT), "SPARKSTROM_RUNS": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    promised = len(SAYS.findall(program()))
    assert promised == 3
    assert done.stdout.splitlines().count("True") == promised, done.stdout
    assert (tmp_path / "digits.npz").exists()


def test_quickstart_page_names_existing_script() -> None:
    """README.md and docs/quickstart.md name the script, which exists."""
    assert "scripts/quickstart" in README.read_text()
    assert "scripts/quickstart" in PAGE.read_text()
    assert (ROOT / "scripts/quickstart").is_file()
