"""Tests of compiled kernels: their directory is private, and later runs need no Numba."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.base import cache_directory
from sparkstrom.base.cache_directory import (
    VARIABLE,
    kernel_directory,
    private_directory,
    use_writable_cache,
)
from sparkstrom.base.errors import SetupError
from sparkstrom.encoding import gaps
from sparkstrom.encoding.cpu import kernel_loader as object_files

ROOT = Path(__file__).parents[2]
SAID = "compiling kernels"


def test_writable_package_uses_its_own_cache(tmp_path: Path) -> None:
    """If the package's own cache directory is writable, it is used."""
    environ: dict[str, str] = {}
    use_writable_cache(environ, tmp_path)
    assert environ == {}
    assert kernel_directory(environ, tmp_path) == tmp_path / "__pycache__"


def test_read_only_package_uses_private_host_directory(tmp_path: Path) -> None:
    """If the package is read-only, kernels go to a private directory of the host."""
    environ = {"SPARK_LOCAL_DIRS": f"{tmp_path},/elsewhere"}  # the application's, so not used
    use_writable_cache(environ, tmp_path / "missing")
    cache = Path(environ.pop(VARIABLE))
    assert cache.parent in (Path("/var/tmp"), Path("/tmp"))
    assert cache == kernel_directory(environ, tmp_path / "missing")
    assert cache.stat().st_mode & 0o777 == 0o700


def test_directory_set_by_user_is_used(tmp_path: Path) -> None:
    """A directory that the user has set is used."""
    environ = {VARIABLE: str(tmp_path / "theirs")}
    use_writable_cache(environ, tmp_path / "missing")
    assert environ == {VARIABLE: str(tmp_path / "theirs")}
    assert kernel_directory(environ, tmp_path) == tmp_path / "theirs"


@pytest.mark.parametrize("how", ["open to all", "another user's", "another user's link"])
@pytest.mark.parametrize("place", ["named", "package"])
def test_cache_directory_controlled_by_others_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    """A directory that is open to all, or of another user, is replaced by a private one."""
    if how != "open to all" and os.getuid() != 0:
        pytest.skip("only root can make what another user has")
    monkeypatch.setattr(cache_directory, "SHARED", (tmp_path / "host",))
    package, safe = tmp_path / "package", tmp_path / "host" / f"sparkstrom-kernels-{os.getuid()}"
    used = tmp_path / "named" if place == "named" else package / "__pycache__"
    for folder in (package, tmp_path / "host", used):
        folder.mkdir()
    environ = {VARIABLE: str(used)} if place == "named" else {}
    assert kernel_directory(environ, package) == used
    if how == "open to all":
        used.chmod(0o777)
    elif how == "another user's":
        os.chown(used, 12345, 12345)
    else:
        used.rename(tmp_path / "elsewhere")
        used.symlink_to(tmp_path / "elsewhere")
        os.chown(used, 12345, 12345, follow_symlinks=False)
    assert kernel_directory(environ, package) == safe
    use_writable_cache(environ, package)
    assert environ == {VARIABLE: str(safe)}


@pytest.mark.parametrize(
    ("mode", "is_used"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)]
)
def test_cache_directory_below_replaceable_parent_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_used: bool
) -> None:
    """A directory is not used if others could rename a folder above it."""
    monkeypatch.setattr(cache_directory, "SHARED", (tmp_path / "host",))
    (tmp_path / "host").mkdir()
    parent, used = tmp_path / "parent", tmp_path / "parent/team/kernels"
    used.mkdir(parents=True)
    parent.chmod(mode)
    safe = used if is_used else tmp_path / "host" / f"sparkstrom-kernels-{os.getuid()}"
    assert kernel_directory({VARIABLE: str(used)}, tmp_path) == safe
    for missing in (False, True):  # Numba would create it
        named = str(used / "new" if missing else used)
        environ = {VARIABLE: named}
        use_writable_cache(environ, tmp_path)
        assert environ == {VARIABLE: named if is_used else str(safe)}


@pytest.mark.parametrize("how", ["open to all", "another user's", "a link"])
def test_kernel_file_writable_by_others_is_recompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A file of kernels that others can write or replace is not read but compiled again."""
    if how == "another user's" and os.getuid() != 0:
        pytest.skip("only root can make what another user has")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    file = tmp_path / f"{gaps.__name__}-{object_files._fingerprint(gaps.__name__)}.kernels"
    file.write_bytes(b"planted")
    if how == "open to all":
        file.chmod(0o666)
    elif how == "another user's":
        os.chown(file, 12345, 12345)
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"write to this file|symbolic links"):
        object_files.read_functions(file)

    def compiled(missing: dict[str, Path], directory: Path) -> None:
        for path in missing.values():
            path.unlink()
            object_files.write_functions(path, {})

    monkeypatch.setattr(object_files, "_compile", compiled)
    assert object_files.load_modules([gaps.__name__]) == {gaps.__name__: {}}


@pytest.mark.parametrize("kept", [0, 30, 100, -1])
def test_damaged_kernel_file_is_recompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """After a crash of the host, the end of a file may be missing or zeros."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    file = tmp_path / f"{gaps.__name__}-{object_files._fingerprint(gaps.__name__)}.kernels"
    object_files.write_functions(file, {"merge": ("symbol", [], "none", 0, bytes(range(200)))})
    whole = file.read_bytes()
    file.write_bytes(whole[:kept].ljust(len(whole), b"\0") if kept else b"")
    monkeypatch.setattr(
        object_files, "_compile", lambda missing, _: object_files.write_functions(file, {})
    )
    assert object_files.load_modules([gaps.__name__]) == {gaps.__name__: {}}


@pytest.mark.parametrize("taken", ["open to all", "a link", "a file"])
def test_private_directory_skips_unsafe_existing_path(tmp_path: Path, taken: str) -> None:
    """A private directory is created elsewhere if its name is taken by something unsafe."""
    roots = (tmp_path / "first", tmp_path / "second", tmp_path / "missing")
    for root in roots[:2]:
        root.mkdir()
    usual = private_directory(roots)
    assert usual.parent == roots[0]
    if taken == "open to all":
        usual.chmod(0o777)
    else:
        usual.rmdir()
        usual.symlink_to(tmp_path) if taken == "a link" else usual.touch()
    other = private_directory(roots)
    assert other.parent == roots[1]
    assert other.stat().st_mode & 0o777 == 0o700
    own = private_directory(roots[2:])
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()


def test_numba_cache_directory_is_set_before_numba_is_imported() -> None:
    """Importing ``sparkstrom.encoding`` sets Numba's cache directory before Numba is imported."""
    program = (
        "import os; real = os.access\n"
        "os.access = lambda path, mode: 'sparkstrom/' not in f'{path}/' and real(path, mode)\n"
        "import sparkstrom.encoding\n"
        "from numba.core import config; print(config.CACHE_DIR)"
    )
    assert run(program, environ()).stdout.startswith(("/var/tmp/", "/tmp/"))


def test_kernels_run_without_numba() -> None:
    program = (
        "import sys\n"
        "from sparkstrom.encoding.backends import warm_up\n"
        "import sparkstrom.worker.training_task\n"
        "warm_up()\n"
        "print([name for name in ('numba', 'scipy') if name in sys.modules])"
    )
    assert run(program, os.environ | {"PYTHONPATH": str(ROOT)}).stdout.strip() == "[]"


PROGRAM = """
from __future__ import annotations
import logging
logging.basicConfig()
from dataclasses import dataclass
from sparkstrom.encoding.cpu.kernel_loader import kernel

@dataclass
class Point:
    x: int

@kernel("i8(i8)")
def twice(x):
    return 2 * x

@kernel("u8(u8)")
def unsigned_half(x):
    return x >> 1

@kernel("u8(i8)")
def quarter(x):
    return unsigned_half(unsigned_half(x))

if __name__ == "__main__":
    assert quarter(-4) == 2**62 - 1
    print(twice(Point(21).x))
"""


@pytest.mark.parametrize("cores", [1, 2])
def test_program_can_define_kernels_beside_dataclasses(tmp_path: Path, cores: int) -> None:
    """With two cores, two processes compile, one of them only a kernel that calls another."""
    usable = sorted(os.sched_getaffinity(0))[:cores]
    if len(usable) < cores:
        pytest.skip("this machine has one core")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT), VARIABLE: str(tmp_path)},
        preexec_fn=lambda: os.sched_setaffinity(0, usable),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "42\n", said.stderr


OTHER_NUMBA = """
import numba.core.codegen as codegen
codegen.CPULibrary = codegen.CPUCodeLibrary
del codegen.CPUCodeLibrary
"""
CALLING = """
import logging
import numpy as np
logging.basicConfig(format="%(message)s")
from sparkstrom.encoding import gaps
from sparkstrom.encoding import update_sum as totals
from sparkstrom.encoding.cpu import kernel_loader
kernel_loader.load_all()
i = np.array([3], np.int32)
print(totals.merge(i, i, i, i, np.zeros(2, np.int32), np.zeros(2, np.int32)))
try:
    totals.merge(i, i, i, i, np.zeros(2), np.zeros(2, np.int32))
except TypeError:
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["of ours", "a user's"])
def test_numba_with_other_internals_uses_own_cache_and_warns_once(
    tmp_path: Path, program: str
) -> None:
    """Later processes use Numba's own cache and do not repeat the failed attempt."""
    text = CALLING if program == "of ours" else PROGRAM
    (tmp_path / "sitecustomize.py").write_text(OTHER_NUMBA)
    (tmp_path / "program.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    surroundings = os.environ | {"PYTHONPATH": path, VARIABLE: str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir(mode=0o700)
    compiled = []
    for _ in range(2):
        said = subprocess.run(
            [sys.executable, str(tmp_path / "program.py")],
            env=surroundings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert said.returncode == 0, said.stderr
        assert said.stdout == ("(1, 0)\nrefused\n" if program == "of ours" else "42\n")
        assert said.stderr.count("has other internals (cannot import name 'CPUCodeLibrary'") == 1
        compiled.append(SAID in said.stderr)
    assert compiled == [True, False]
    kept = {path.relative_to(tmp_path / "cache").parts[0] for path in tmp_path.rglob("*.nbi")}
    assert kept
    assert all(name.endswith(".jit") for name in kept)  # named by a hash of the compiled source


def environ() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}


def run(program: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )


@pytest.fixture
def read_only_package(tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the package without write permission."""
    package = tmp_path / "site" / "sparkstrom"
    shutil.copytree(ROOT / "sparkstrom", package, ignore=shutil.ignore_patterns("__pycache__"))
    folders = [path for path in (package, *package.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    yield package
    for folder in folders:
        folder.chmod(0o755)


COUNTING = """
import logging, os, sys
from pathlib import Path
if os.getuid() == 0:  # whom no mode stops
    real = os.access
    os.access = lambda path, mode: 'site/sparkstrom' not in str(path) and real(path, mode)
logging.basicConfig()
import sparkstrom.base.cache_directory as cache_directory
cache_directory.SHARED = (Path(sys.argv[1]),)
import numpy as np
from sparkstrom.encoding import update_sum as totals
i = np.array([3], np.int32)
room = np.zeros(2, np.int32), np.zeros(2, np.int32)
print(totals.merge(i, i, i, i, *room))
"""


@pytest.mark.slow
def test_a_read_only_installation_compiles_once_per_host(
    tmp_path: Path, read_only_package: Path
) -> None:
    """Two processes start at the same time, and one later."""
    host = tmp_path / "host"
    host.mkdir()
    environ = os.environ | {"PYTHONPATH": str(read_only_package.parent)}
    command = [sys.executable, "-c", COUNTING, str(host)]

    def start() -> subprocess.Popen[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=environ, text=True, cwd=tmp_path, **pipes)

    said: list[str] = []
    for processes in ([start(), start()], [start()]):
        answers = [process.communicate(timeout=300) for process in processes]
        assert [out for out, _ in answers] == ["(1, 0)\n"] * len(processes), answers
        said += [err for _, err in answers]
    assert sum(SAID in err for err in said) == 1
    assert len(list(host.rglob("*.kernels"))) == 1
    assert not list(read_only_package.rglob("*.kernels"))


def test_kernel_file_name_depends_on_source_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's name depends on its source, the intrinsics and the processor."""
    before = object_files._fingerprint(gaps.__name__)
    assert object_files._fingerprint(gaps.__name__) == before
    real = object_files.module_source
    for changed in (gaps.__name__, "sparkstrom.encoding.cpu.intrinsics"):
        with monkeypatch.context() as patch:
            patch.setattr(
                object_files,
                "module_source",
                lambda name, c=changed: real(name) + "#" * (name == c),
            )
            assert object_files._fingerprint(gaps.__name__) != before
    monkeypatch.setattr(object_files, "_platform", lambda: "another")
    assert object_files._fingerprint(gaps.__name__) != before


def test_package_versions_are_found_without_searching_sys_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``sys.path`` is not searched: in a Spark task it has archives of thousands of files."""
    packages = ("numba", "llvmlite", "numpy")
    installed = [importlib.metadata.version(package) for package in packages]
    monkeypatch.setattr(importlib.metadata, "version", pytest.fail)  # searches the whole path
    assert [object_files._find_version(package) for package in packages] == installed


def test_failed_compilation_raises_with_compiler_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed compilation raises ``SetupError`` with the compiler's message."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(object_files, "COMPILER", "no_such_module")
    with pytest.raises(SetupError, match=r"kernels could not be compiled.*no_such_module"):
        object_files.load_modules([gaps.__name__])
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.lock"]


def test_interrupted_wait_kills_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the notebook's process receives Ctrl-C, so it must kill the compilers."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        object_files.load_modules([gaps.__name__])
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.slow
def test_disabled_numba_jit_does_not_change_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NUMBA_DISABLE_JIT, set to debug or measure the program's own code, changes no kernel."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(object_files, "_platform", object_files._platform.__wrapped__)
    before = object_files._platform()
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert object_files._platform() == before
    assert object_files.load_modules([gaps.__name__])[gaps.__name__]


def test_spark_worker_runs_only_one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Spark worker, which may have few cores, only one compiler runs."""
    monkeypatch.setitem(sys.modules, "pyspark.worker", sys)
    assert object_files._count_compilers() == 1


def test_unusable_cache_directory_error_names_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache directory that is a file raises ``SetupError`` with the variable to set."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(SetupError, match=f"file.*set {VARIABLE}"):
        object_files.load_modules([gaps.__name__])


def test_stuck_compiler_error_names_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting too long for another process's compiler raises ``SetupError`` with the lock file."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(object_files, "COMPILE_S", 0.0)
    lock = tmp_path / "kernels.lock"
    with (
        object_files._lock(lock),
        pytest.raises(SetupError, match=r"kernels\.lock.*end it"),
    ):
        object_files.load_modules([gaps.__name__])


@pytest.mark.parametrize(
    "bad",
    [np.zeros(3), np.zeros(6, np.int32)[::2], np.zeros((3, 1), np.int32)],
    ids=["dtype", "strided", "dimensions"],
)
def test_kernel_rejects_arrays_of_other_type_or_layout(bad: np.ndarray) -> None:
    """A kernel raises ``TypeError`` for arrays of another type, layout or dimension."""
    with pytest.raises(TypeError, match="kernel write_gaps takes int32"):
        gaps.write_gaps(bad, 3, np.zeros(100, np.uint8))


def test_kernel_rejects_read_only_output_array() -> None:
    """A kernel raises ``TypeError`` for a read-only array that it would write."""
    fixed = np.zeros(100, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        gaps.write_gaps(np.array([1], np.int32), 3, fixed)
