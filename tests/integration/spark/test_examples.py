"""Tests that run the examples by spark-submit and check what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.several_examples import read_answers

ROOT = Path(__file__).parents[3]
TWO_EXECUTORS = "local-cluster[2,1,1024]"
OTHERS = {  # the library that each example needs
    "torch_digits.py": "torch",
    "jax_digits.py": "jax",
    "lightning_digits.py": "pytorch_lightning",
    "hf_tokens.py": "transformers",
}

pytestmark = pytest.mark.timeout(1_200)  # one application runs most of them


def run_spark_submit(preloaded: str, program: str, *arguments: str) -> str:
    """Run a program by spark-submit with conf/laptop.conf and our daemon; return its output.

    ``preloaded`` is a module that the daemon imports, which may take seconds on each executor.
    """
    import pyspark

    command = [str(Path(pyspark.__path__[0]) / "bin/spark-submit"), "--master", TWO_EXECUTORS]
    command += ["--properties-file", "conf/laptop.conf", "--conf", "spark.driver.host=127.0.0.1"]
    command += ["--conf", "spark.python.daemon.module=sparkstrom.spark.daemon"]
    command += ["--conf", f"spark.executorEnv.SPARKSTROM_PRELOAD={preloaded}"]
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [*command, program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1_000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory to which examples write."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def example_results(folder: Path, request: pytest.FixtureRequest) -> dict[str, tuple[int, str]]:
    """The exit status and the output of each selected example; one application runs them all."""
    commands = {
        "digits.py": "examples/digits.py --epochs 40",
        **{name: f"examples/{name}" for name, library in OTHERS.items() if find_spec(library)},
        "export.py": f"SPARKSTROM_EXPORT_DIRECTORY={folder}/rows examples/export.py",
        "pipeline.py": f"examples/pipeline.py {folder}/saved",
    }
    tests = [item for item in request.session.items if item.path == request.path]
    wanted = {dict(item.callspec.params)["example"] for item in tests}
    commands = {name: command for name, command in commands.items() if name in wanted}
    program = str(ROOT / "scripts/several_examples.py")
    preloaded = "torch" if commands.keys() & OTHERS.keys() else "pyarrow"
    printed = run_spark_submit(preloaded, program, *commands.values())
    answers = read_answers(printed)
    assert [answer["command"] for answer in answers] == [*commands.values()]
    return {
        name: (answer["status"], answer["printed"])
        for name, answer in zip(commands, answers, strict=True)
    }


@pytest.mark.parametrize("example", ["digits.py"])
def test_digits_example_prints_accuracy(
    example_results: dict[str, tuple[int, str]], example: str
) -> None:
    status, printed = example_results[example]
    assert status == 0, printed
    assert "held-out accuracy" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("example", "needs"), OTHERS.items())
def test_library_examples_print_accuracy(
    example_results: dict[str, tuple[int, str]], example: str, needs: str
) -> None:
    if not find_spec(needs):
        pytest.skip(f"{needs} is not here: the extra test-all has it")
    status, printed = example_results[example]
    assert status == 0, printed
    assert "held-out accuracy" in printed


@pytest.mark.slow
@pytest.mark.parametrize("example", ["export.py"])
def test_export_example_removes_exported_rows(
    example_results: dict[str, tuple[int, str]], folder: Path, example: str
) -> None:
    status, printed = example_results[example]
    assert status == 0, printed
    assert f"rows in {folder}/rows/sparkstrom-" in printed
    assert list((folder / "rows").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("example", ["pipeline.py"])
def test_pipeline_example_saves_pipeline(
    example_results: dict[str, tuple[int, str]], folder: Path, example: str
) -> None:
    status, printed = example_results[example]
    assert status == 0, printed
    assert "held out: 0.9" in printed
    assert "seconds of the last fit: " in printed
    assert (folder / "saved/metadata").is_dir()
