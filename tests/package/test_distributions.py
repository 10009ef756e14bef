"""Tests of what `python -m build` makes: its contents, and README.md's program with the wheel."""

from __future__ import annotations

import email
import os
import re
import shlex
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
LIMIT_S = 1500  # pip, kernels and a fit take two minutes alone, and more while other tests run
REPOSITORY = "https://example.org/owner/name"
PLATFORM = "manylinux_2_28_x86_64"
TORCH = "torch==2.13.0"  # as in the extra `test`: the build without CUDA, for CPython 3.11
# As in conf/laptop.conf: a JVM for short programs, with little compilation.
JVM = {"JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of a copy of this tree, and the wheel that is built from the sdist.

    In the copy, pyproject.toml has a repository address.
    """
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("built")
    copy, out = folder / "tree", folder / "dist"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT), symlinks=True)
    settings = (copy / "pyproject.toml").read_text()
    assert 'repository = ""' in settings, "it is known now: use it here"
    settings = settings.replace('repository = ""', f'repository = "{REPOSITORY}"')
    (copy / "pyproject.toml").write_text(settings)
    (copy / "sparkstrom.egg-info").mkdir()  # as after an editable install; the build replaces it
    # Without isolation: the build tools are installed, so no network is needed.
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


def test_wheel_metadata_has_platform_python_and_repository(built: Path) -> None:
    """The wheel's metadata have platform, Python version, author and repository."""
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
    assert wheel.name.endswith(f"-py3-none-{PLATFORM}.whl")
    assert facts["Author"]
    assert f"Repository, {REPOSITORY}" in facts.get_all("Project-URL", [])


def test_description_links_are_absolute(built: Path) -> None:
    """Links in the wheel's description are absolute, also those that are relative in README.md."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = email.message_from_bytes(archive.read(name)).get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert f"{REPOSITORY}/blob/main/docs/quickstart.md" in links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_source_distribution_has_all_files_of_git(built: Path) -> None:
    """The source distribution has every file of the git checkout, and no generated module."""
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


def test_import_without_aeron_warns_within_one_second(built: Path, tmp_path: Path) -> None:
    """The import warns early if the environment has the wheel but not Aeron's library."""
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
    assert float(spent_s) < FIRST_SECOND_S  # CPU time, whatever else the machine runs
    assert any("fetch-aeron" in word and str(home) in word for word in words), words


@pytest.mark.timeout(LIMIT_S)
def test_readme_program_runs_in_fresh_environment(built: Path, tmp_path: Path) -> None:
    """README.md's install lines, with the wheel instead of a clone, and its program succeed."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("PyPI has torch for processors alone for CPython 3.11 only")
    (wheel,) = built.glob("*.whl")
    text = (ROOT / "README.md").read_text()
    (installing,) = re.findall(r"^```sh\n(python3 -m venv .*?)^```", text, re.S | re.M)
    make, install, fetch = installing.splitlines()
    assert install.startswith("pip install '.[")
    install = install.partition("or a wheel: ")[2].replace("PATH_TO_WHEEL", str(wheel))
    program = re.search(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert program is not None
    (tmp_path / "program.py").write_text(program[1])
    (tmp_path / "constraints.txt").write_text(TORCH)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    # Only what takes minutes is prepared: the dependencies are there when pip looks for them, and
    # kernels are the checkout's. In test_version_pair.py, a wheel compiles its own.
    python, wanted = ".venv/bin/python", shlex.split(install)[-1]
    prepared = (
        [sys.executable, str(ROOT / "scripts/install.py"), python, wanted],
        [python, "-m", "pip", "uninstall", "--quiet", "--yes", "sparkstrom"],
    )
    package = ".venv/lib/python3.11/site-packages/sparkstrom"
    kernels = ["cp", "-rp", str(ROOT / "sparkstrom/__pycache__"), package]
    lines = [make, *map(shlex.join, prepared), install, fetch, shlex.join(kernels)]
    script = "\n".join(["set -e", *lines, "python program.py"])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK", "PYSPARK"))}
    own = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(tmp_path / "constraints.txt"),
        "PIP_COMPILE": "0",  # few of the thousands of modules are imported
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=kept | JVM | own,
        capture_output=True,
        text=True,
        timeout=LIMIT_S - 100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2 workers trained 20 epochs of 19,210 parameters" in done.stdout
    assert "bit-identical, on the driver and all workers" in done.stdout
    accuracy = re.search(r"^held-out accuracy (\S+)$", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert (tmp_path / "digits.pt").exists()
