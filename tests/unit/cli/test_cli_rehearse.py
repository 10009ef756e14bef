"""Tests of ``sparkstrom rehearse``: a script's first fit is simulated and ends the script."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.cli.main import main
from sparkstrom.rehearsal.script import rehearse_instead, rehearse_script

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from sparkstrom import ParallelWrapper
from sparkstrom.models.dense import DenseNetwork
from beside import EPOCHS

print("the script prints", sys.argv[1:])
features = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
labels = (features.sum(axis=1) > 0).astype("int64")
try:
    with ParallelWrapper(DenseNetwork([3, 2]), workers=2, progress=False) as wrapper:
        wrapper.fit((features, labels), epochs=EPOCHS, validation=0.25)
except Exception:
    Path(sys.argv[1]).write_text("handled")
else:
    Path(sys.argv[1]).write_text("trained")
finally:
    Path(sys.argv[1] + ".left").write_text("")
"""

PLAIN_FIT = """
import numpy as np
from sparkstrom import ParallelWrapper
from sparkstrom.models.dense import DenseNetwork

rows = np.eye(3, dtype="float32"), np.array([0, 1, 1])
ParallelWrapper(DenseNetwork([3, 2]), workers=1, progress=False).fit(rows)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("EPOCHS = 2\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_first_fit_is_simulated_and_ends_script(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script ends at its first fit: its handlers do not run, its ``finally`` blocks do."""
    made, page = tmp_path / "made", tmp_path / "page.html"
    flags = ["--workers", "1,2", "--step", "20ms", "--scaling", "sequential,ddp", "--json"]
    more = ["--link", "100mbit", "--latency", "2ms", "--jitter", "0.1", "--save", str(page)]
    assert main(["rehearse", str(script), str(made), *flags, *more]) == 0
    out, err = capsys.readouterr()
    simulated = json.loads(out)
    assert [run["workers"] for run in simulated["runs"]] == [1, 1, 2, 2, 2]
    assert (simulated["epochs"], simulated["is_held_out"]) == (2, True)
    assert simulated["conditions"]["link_bits_s"] == 1e8
    assert f"the script prints ['{made}']" in err
    assert not made.exists()
    assert (tmp_path / "made.left").exists()
    assert "<svg" in page.read_text()


def test_arguments_after_dashes_are_passed_to_script(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments after ``--`` are the script's; without --json, a table is printed."""
    made = str(tmp_path / "made")
    assert main(["rehearse", "--workers", "2", str(script), "--", made, "--lr", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "2 x sparkstrom" in out
    assert "'--lr', '0.1'" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "it ended without a fit of a SparkNetwork or ParallelWrapper"),
        ("raise SystemExit(3)", "it ended with exit code 3 without a fit"),
    ],
)
def test_a_script_without_a_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    """A script that ends without a fit exits with code 2 and a message."""
    path = tmp_path / "empty.py"
    path.write_text(text)
    assert main(["rehearse", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "a"], "--workers 'a': write numbers of workers with commas"),
        (["--rows", "many"], "--rows 'many': number 'many'"),
        (["--link", "slow"], "link='slow'"),
        (["--kill", "-1"], "kill=-1"),
        (["--scaling", "best"], "scaling='best'"),
        (["--jitter", "big"], "--jitter 'big'"),
        (["--save", ""], "--save '': it is a directory; name a file in a writable directory"),
        (["--save", "/nowhere/x/page.html"], "x/page.html': there is no directory /nowhere/x;"),
    ],
)
def test_flags_are_checked_before_the_script_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    """A wrong flag exits with code 2 before the script runs."""
    path, begun = tmp_path / "train.py", tmp_path / "begun"
    path.write_text(f"open({str(begun)!r}, 'w')")
    assert main(["rehearse", str(path), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not begun.exists()


def test_table_is_printed_if_page_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, the figures were lost. The script also changes the directory, without effect."""
    path, folder = tmp_path / "train.py", tmp_path / "pages"
    folder.mkdir()
    path.write_text(f"import os; os.rmdir({str(folder)!r}); os.chdir('/')\n" + PLAIN_FIT)
    assert main(["rehearse", str(path), "--workers", "1", "--save", f"{folder}/page.html"]) == 2
    out, err = capsys.readouterr()
    assert "1 x sparkstrom" in out
    assert "page.html': " in err


def test_json_output_excludes_output_of_script_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before, only what Python printed went to standard error; the file could not be read."""
    path = tmp_path / "train.py"
    path.write_text("import os\nos.system('echo hello')\n" + PLAIN_FIT)
    assert main(["rehearse", str(path), "--workers", "1", "--step", "10ms", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["rows"] == 3
    assert "hello" in err


@pytest.mark.parametrize(
    "change", ["sys.path = [one for one in sys.path if one != {!r}]", "sys.path.remove({!r})"]
)
def test_a_script_may_change_the_import_path(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, the rehearsal was lost when it ended."""
    path, before = tmp_path / "train.py", sys.path[:]
    path.write_text(f"import sys\n{change.format(str(tmp_path))}\n" + PLAIN_FIT)
    assert main(["rehearse", str(path), "--workers", "1"]) == 0
    assert "1 x sparkstrom" in capsys.readouterr().out
    assert sys.path == before


def test_missing_script_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "nowhere.py"]) == 2
    assert "nowhere.py: there is no such file" in capsys.readouterr().err


# In a real program, a SystemExit ends a thread without a message.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "ending",
    [
        "try:\n    summary = train(0)\nfinally:\n    print(summary)",
        "try:\n    train(0)\nexcept:\n    raise SystemExit(1)",
        "try:\n    train(0)\nexcept BaseException:\n    pass",
        # Before, the pool waited forever, as Spark ML's CrossValidator did.
        "from multiprocessing.pool import ThreadPool\nwith ThreadPool(2) as pool:\n"
        "    pool.map(train, range(2))",
        # On CPython 3.11, ``join`` no longer waits for a thread after a signal has interrupted it
        # once, so pytest could report the thread's SystemExit in another test.
        "from threading import Thread\ndef run():\n    try:\n        train(0)\n"
        "    except SystemExit:\n        pass\n"
        "thread = Thread(target=run)\nthread.start()\nthread.join()",
    ],
)
def test_rehearsal_result_survives_any_script_ending(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, errors in ``finally``, bare ``except`` clauses and threads lost the result."""
    path = tmp_path / "train.py"
    body = PLAIN_FIT.replace("ParallelWrapper(Dense", "def train(_):\n    ParallelWrapper(Dense")
    path.write_text(body + ending)
    before = threading.enumerate()
    assert main(["rehearse", str(path), "--workers", "1", "--step", "10ms"]) == 0
    assert "1 x sparkstrom" in capsys.readouterr().out
    for thread in {*threading.enumerate()} - {*before}:
        thread.join()


LEFT_BEHIND = """
import os
import signal
import threading

from sparkstrom.rehearsal.script import INTERRUPTION, ScriptRehearsed, rehearse_instead

handler, began = signal.getsignal(INTERRUPTION), threading.Event()

def rehearse(data):
    began.set()
    while signal.getsignal(INTERRUPTION) is handler:  # until the script's code has ended
        os.sched_yield()
    return "result"

def run():
    if {is_late}:
        began.set()
        while signal.getsignal(INTERRUPTION) is not signal.SIG_DFL:  # until it is over
            os.sched_yield()
    for _ in range(3):
        try:
            rehearse_instead(rehearse, "rows")
        except ScriptRehearsed:
            pass
        else:
            open("trained", "w").close()

threading.Thread(target=run).start()
began.wait()
"""


@pytest.mark.parametrize("is_late", [False, True])
def test_a_thread_that_a_script_leaves_running_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Its fit is rehearsed if it begins before the end of the script; later ones do not run."""
    monkeypatch.chdir(tmp_path)
    path, before = tmp_path / "train.py", {*threading.enumerate()}
    path.write_text(LEFT_BEHIND.replace("{is_late}", str(is_late)))
    with pytest.raises(UsageError, match="without a fit") if is_late else nullcontext():
        assert rehearse_script(path, [], {}) == "result"
    for thread in {*threading.enumerate()} - before:
        thread.join()
    assert not Path("trained").exists()
    rehearse_instead(lambda data: pytest.fail("no script is rehearsed"), "rows")  # type: ignore[arg-type]


ENDLESS_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, name="endless").start()
"""
ENDLESS_POOL = """
import threading
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(thread_name_prefix="endless").submit(threading.Event().wait)
"""
COMMAND = """
import sys
from sparkstrom.cli.main import main
from sparkstrom.rehearsal import script

script.LEFT_THREADS_S = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("script", "name"), [(ENDLESS_THREAD, "endless"), (ENDLESS_POOL, "endless_0")]
)
def test_a_thread_that_never_ends_does_not_keep_the_command(
    tmp_path: Path, script: str, name: str
) -> None:
    """Before, the figures were printed, and the command waited for the script's thread."""
    path = tmp_path / "train.py"
    path.write_text(script + PLAIN_FIT)
    options = ["rehearse", "--workers", "1", "--step", "10ms", "--json", str(path)]
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *options], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["runs"]
    assert ended.stderr.endswith(f"the script's threads still run: {name}\n")
