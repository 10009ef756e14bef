"""`scripts/matrix`: try which versions of Spark work with which CPython, with the wheel for users.

For each pair it creates a virtual environment, in which `scripts/install.py` installs the wheel of
this checkout and pyspark. From a folder outside of the checkout it submits two examples to two
executors: the built-in network, and a model of PyTorch, or of JAX if PyPI has no CPU build of
PyTorch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.several_examples import read_answers

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
SPARKS = {"3.5": "pyspark==3.5.*", "4.0": "pyspark==4.0.*", "4.x": "pyspark>=4,<5"}
TORCH = "torch==2.13.0"  # as in the extra `test`: the CPU build, for CPython 3.11
STEP_S = 900.0
SHOWN_LINES = 15  # last lines of the output of a step that failed
MASTER = "local-cluster[2,1,1024]"


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair of versions, which is one row of the table."""

    python: str
    spark: str

    def __str__(self) -> str:
        return f"{self.python}/{self.spark}"


@dataclass(frozen=True, slots=True)
class Model:
    """An example, and the packages that it needs in addition to the wheel."""

    name: str
    example: str
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a pair; ``failed`` is empty if all steps succeeded."""

    pair: Pair
    versions: Mapping[str, str]
    passed: tuple[str, ...]
    failed: str = ""
    seconds: float = 0.0


class StepFailed(RuntimeError):
    """A command failed; the message has the command and the end of its output."""


DENSE = Model("built-in", "digits.py", arguments=("--epochs", "5"))
TORCH_MODEL = Model("PyTorch", "torch_digits.py", (TORCH,))
JAX_MODEL = Model("JAX", "jax_digits.py", ("jax>=0.4.36", "optax>=0.2.4"))


def main(arguments: list[str]) -> int:
    """Try the pairs and print the table; return 0 if all pairs work."""
    parser = argparse.ArgumentParser(prog="scripts/matrix", description=__doc__)
    pairs = [Pair(python, spark) for python in PYTHONS for spark in SPARKS]
    parser.add_argument(
        "pairs", nargs="*", metavar="PYTHON/SPARK", help=f"of {', '.join(map(str, pairs))}; all"
    )
    args = parser.parse_args(arguments)
    unknown = set(args.pairs) - set(map(str, pairs))
    if unknown:
        parser.error(f"{min(unknown)!r} is none of {', '.join(map(str, pairs))}")
    wanted = [pair for pair in pairs if not args.pairs or str(pair) in args.pairs]
    with tempfile.TemporaryDirectory(prefix="sparkstrom-matrix-") as folder:
        home = Path(folder)
        wheel = build(home)
        outcomes = [told(try_pair(pair, wheel, home)) for pair in wanted]
    print("\n".join(table(outcomes)))
    return 0 if all(not outcome.failed for outcome in outcomes) else 1


def told(outcome: Outcome) -> Outcome:
    """Print an outcome before the next pair is tried; return it."""
    print(f"{outcome.pair}: {outcome.failed or 'ok'} ({outcome.seconds:.0f} s)", file=sys.stderr)
    return outcome


def build(home: Path) -> Path:
    """Build the wheel of this checkout; return its path."""
    # Without isolation: the extra "test" has the build tools.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    call([*command, "--outdir", str(home / "dist"), str(ROOT)], os.environ, home)
    (wheel,) = (home / "dist").glob("*.whl")
    return wheel


def try_pair(pair: Pair, wheel: Path, home: Path) -> Outcome:
    """Try a pair in a new folder, which is removed afterwards: an environment takes a gigabyte."""
    began_s = time.monotonic()
    folder, passed, versions = home / str(pair).replace("/", "-"), list[str](), dict[str, str]()
    model = TORCH_MODEL if pair.python == "3.11" else JAX_MODEL
    failed = ""
    folder.mkdir()
    try:
        environment = prepared(pair, wheel, model, folder)
        versions = versions_in(environment, folder)
        for each in submit((DENSE, model), environment, folder):
            passed.append(each.name)  # kept if a later one fails
    except StepFailed as error:
        failed = str(error)
    finally:
        shutil.rmtree(folder)
    return Outcome(pair, versions, tuple(passed), failed, time.monotonic() - began_s)


def prepared(pair: Pair, wheel: Path, model: Model, folder: Path) -> dict[str, str]:
    """Install the wheel and pyspark; return the variables with which programs run there."""
    python = interpreter(pair.python)
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "SPARK_HOME", "VIRTUAL_ENV", "PYSPARK_PYTHON")
        and not name.startswith("JAX_")  # the cache of scripts/test needs another package
    }
    pip = [] if pair.python == "3.11" else ["--without-pip"]  # only fetch-aeron needs it
    call([python, "-m", "venv", *pip, str(folder / "venv")], variables, folder)
    here = folder / "venv/bin"
    variables |= {
        "PATH": f"{here}:{variables['PATH']}",
        "PYSPARK_PYTHON": str(here / "python"),
        "SPARK_LOCAL_IP": variables.get("SPARK_LOCAL_IP", "127.0.0.1"),
    }
    install = [sys.executable, str(ROOT / "scripts/install.py"), str(here / "python")]
    call([*install, f"{wheel}[examples]", SPARKS[pair.spark], *model.needs], variables, folder)
    if pair.python == "3.11":
        call([str(here / "sparkstrom"), "fetch-aeron"], variables, folder)
    return variables


def interpreter(version: str) -> str:
    """Return the path of a CPython; raise StepFailed if there is none."""
    for path in _interpreters(version):
        check = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if check.returncode == 0 and f"Python {version}." in check.stdout:
            return path
    raise StepFailed(
        f"no CPython {version} here: put python{version} on PATH, or install it by pyenv"
    )


def _interpreters(version: str) -> Iterator[str]:
    if (found := shutil.which(f"python{version}")) is not None:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


def versions_in(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the installed versions of the important packages."""
    script = (
        "import importlib.metadata as m, platform; print('CPython', platform.python_version())\n"
        "for name in ('pyspark', 'numpy', 'numba', 'pyarrow', 'torch', 'jax'):\n"
        "    if any(m.distributions(name=name)): print(name, m.version(name))"
    )
    said = call([variables["PYSPARK_PYTHON"], "-c", script], variables, folder)
    return dict(line.split(" ", 1) for line in said.splitlines())


def submit(models: Iterable[Model], variables: Mapping[str, str], folder: Path) -> Iterator[Model]:
    """Run the models' examples in one application; yield the models whose examples succeed.

    Raise StepFailed if an example fails, which it also does if replicas differ or accuracy is low.
    """
    submitting = Path(variables["PYSPARK_PYTHON"]).with_name("spark-submit")
    conf = ("--conf", "spark.ui.enabled=false")
    program = shutil.copy(ROOT / "scripts/several_examples.py", folder)
    commands = {}
    for model in models:
        example = shutil.copy(ROOT / "examples" / model.example, folder)
        commands[shlex.join([example, *model.arguments])] = model
    command = [str(submitting), "--master", MASTER, *conf, program, *commands]
    printed = call(command, variables, folder)
    answers = read_answers(printed)
    if [answer["command"] for answer in answers] != [*commands]:
        raise StepFailed(f"{program} did not run all of {', '.join(commands)}:\n{printed}")
    for answer in answers:
        model = commands[answer["command"]]
        if answer["status"]:
            raise StepFailed(f"{model.example} ended with {answer['status']}:\n{answer['printed']}")
        yield model


def call(command: list[str], variables: Mapping[str, str], folder: Path) -> str:
    """Run a command and return its output; raise StepFailed if it fails."""
    name = " ".join(Path(part).name if "/" in part else part for part in command[:4])
    try:
        done = subprocess.run(
            command, env=variables, cwd=folder, capture_output=True, text=True, timeout=STEP_S
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{name} took longer than {STEP_S:g} s") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-SHOWN_LINES:])
        raise StepFailed(f"{name} ended with {done.returncode}:\n{last}")
    return done.stdout


def table(outcomes: list[Outcome]) -> list[str]:
    """Return the lines of the table in docs/compatibility.md."""
    lines = [
        "| CPython | Spark | NumPy | Numba | PyArrow | bit-equal replicas |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        found = outcome.versions
        libraries = [found.get(name, "") for name in ("pyspark", "numpy", "numba", "pyarrow")]
        other = next((f"{name} {found[name]}" for name in ("torch", "jax") if name in found), "")
        said = ", ".join(outcome.passed[:1] + ((other,) if len(outcome.passed) > 1 else ()))
        if outcome.failed:
            said = f"**failed**: {outcome.failed.splitlines()[0]}"
        python = found.get("CPython", outcome.pair.python)
        lines.append(f"| {' | '.join([python, *libraries, said])} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
