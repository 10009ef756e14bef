"""What `python -m build` makes has everything, and nothing that a checkout has beside it."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "_aeron.py")
GENERATED = "sparkstrom/transport/aeron/_aeron.py"
FIRST_SECOND_S = 1.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel, from a copy of this tree; the wheel is made from the sdist."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("built")
    copy, out = folder / "tree", folder / "dist"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT), symlinks=True)
    (copy / "sparkstrom.egg-info").mkdir()  # as an editable install leaves it; made anew
    # Without isolation: what builds is here, and no network is needed.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def modules() -> set[str]:
    files = (ROOT / "sparkstrom").rglob("*.py")
    return {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts} | {GENERATED}


def test_the_wheel_has_every_module_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        generated = archive.read(GENERATED).decode()
    assert names == modules() | {"sparkstrom/py.typed"}
    assert "aeron_subscription_t" in generated


def test_the_wheel_says_what_it_is_for(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        facts = email.message_from_bytes(archive.read(name))
        (entries,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert "sparkstrom = sparkstrom.cli.main:main" in archive.read(entries).decode()
    assert facts["Summary"].endswith("on Linux x86_64")
    assert "Operating System :: POSIX :: Linux" in facts.get_all("Classifier", [])
    assert facts["Requires-Python"] == ">=3.11"
    aeron = [line for line in facts.get_all("Requires-Dist", []) if line.startswith("pyaeron")]
    assert len(aeron) == 1
    assert "x86_64" in aeron[0]


def test_the_source_distribution_has_what_git_has(built: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git checkout: what belongs to the source is not known")
    tracked = {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - names - {".gitignore", ".venv"} == set()
    assert GENERATED not in names


def test_a_program_without_aeron_is_told_in_the_first_second(built: Path, tmp_path: Path) -> None:
    """In an environment that has the wheel, and what it needs, but not Aeron's library."""
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "env"
    venv.create(home)
    site = next((home / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    program = tmp_path / "program.py"
    program.write_text("""import sys, time
sys.modules["pyaeron"] = None  # a wheel of other Pythons
begun = time.process_time()
import warnings
def told(message, category, filename, lineno, *rest):
    print(category.__name__, filename, lineno, time.process_time() - begun, message, sep="\\n")
    raise SystemExit
warnings.showwarning = told
from sparkstrom import SparkNetwork
""")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK"))}
    command = [str(home / "bin/python"), str(program)]
    done = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    category, where, line, spent_s, *words = done.stdout.splitlines()
    assert (category, where, line) == ("RuntimeWarning", str(program), "9"), done.stderr
    assert float(spent_s) < FIRST_SECOND_S  # of this process, however busy the machine is
    assert any("fetch-aeron" in word and str(home) in word for word in words), words
