"""Tests of ``sparkstrom scaling``: effects of flags, measured scripts and wrong calls."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.cli.main import main
from sparkstrom.planning import scaling
from sparkstrom.planning.scaling import ScalingInputs

ASKED = ["scaling", "--params", "25e6", "--step", "300ms", "--density", "1e-3", "--link", "1gbit",
         "--latency", "1ms", "--workers", "2..64"]  # fmt: skip
SCRIPT = """
import numpy as np
from sparkstrom.models import DenseNetwork
model = DenseNetwork([8, 16, 4], seed=1)
random = np.random.default_rng(0)
batch = random.random((32, 8), dtype=np.float32), random.integers(0, 4, 32)
"""


def run_scaling(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """Return the JSON answer of a command with these flags."""
    assert main([*ASKED, *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("--params", "1e6"),
        ("--step", "0.1"),
        ("--density", "1e-2"),
        ("--link", "100mbit"),
        ("--latency", "20ms"),
        ("--workers", "2,4"),
        ("--fan-out", "4"),
        ("--spread", "0.1"),
        ("--encoding", "20ms"),
    ],
)
def test_every_flag_changes_the_answer(capsys: pytest.CaptureFixture[str], flags: Any) -> None:
    assert run_scaling(capsys, *flags)["rows"] != run_scaling(capsys)["rows"]


def test_each_worker_count_has_star_mesh_and_ring_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each number of workers has figures for star, mesh and ring."""
    found = run_scaling(capsys)
    assert [row["workers"] for row in found["rows"]] == list(range(2, 65))
    assert set(found["best_workers"]) == set(found["pays_up_to"]) == {"star", "mesh", "ring"}
    wanted = {"step_s", "efficiency", "speedup", "staleness", "limited_by", "worker_sent"}
    assert wanted <= set(found["rows"][0]["star"])
    assert found["params"] == 25_000_000


def test_answer_is_readable_text_without_json_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json, the answer is readable text."""
    assert main(ASKED) == 0
    shown = capsys.readouterr().out
    for title in ("star (plain)", "mesh", "dense all-reduce (ring)"):
        assert title in shown
    assert shown.count("most minibatches per second") == 3
    assert "1 Gbit/s" in shown


def test_measure_takes_values_from_script_unless_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--measure measures a script's model; given values take precedence over measured ones."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    assert main(["scaling", "--measure", str(script), "--workers", "1,2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["params"] == 8 * 16 + 16 + 16 * 4 + 4
    assert 0 < found["step_s"] < 5
    assert 0 < found["encoding_s"] < 5
    flags = ["--measure", str(script), "--step", "2s", "--workers", "1", "--json"]
    assert main(["scaling", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == 2.0  # a given value takes precedence
    flags = ["--measure", str(script), "--params", "25e6", "--workers", "1", "--json"]
    assert main(["scaling", *flags]) == 0
    larger = json.loads(capsys.readouterr().out)  # its encoding is calculated: none was measured
    work = ScalingInputs(25_000_000, larger["step_s"], 1e-3, 1e9, 2e-4)
    assert larger["encoding_s"] == work.publish_cpu_s


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "there is no such file"),
        ("x = 1", "it defines no model and no batch"),
        (SCRIPT + "model = 3", "defines no model: model=3: pass"),
        (SCRIPT + "batch = batch[0]", "`batch` is a ndarray"),
        (SCRIPT + "batch = batch[0][:, :5], batch[1]", "rows have 5 features, the network takes 8"),
        (SCRIPT + "batch = batch[0][:0], batch[1][:0]", "`batch` has no rows"),
        (SCRIPT + "batch = 'rows', batch[1]", "the features of `batch` are not rows"),
        (SCRIPT + "batch = batch[0], 3", "the labels of `batch` are not rows"),
        (SCRIPT + "raise SystemExit(3)", "it ended with exit code 3; name a script that leaves"),
    ],
)
def test_unsuitable_script_exits_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: str | None, words: str
) -> None:
    """An unsuitable script exits with code 2 and a message that names what is wrong."""
    path = tmp_path / "mine.py"
    if script is not None:
        path.write_text(script)
    assert main(["scaling", "--measure", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_script_output_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What a script prints goes to standard error, so that the JSON can be parsed."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + "print('from the script')")
    assert main(["scaling", "--measure", str(script), "--workers", "2", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["params"] > 0
    assert "from the script" in shown.err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--workers", "4..2"), ("--link", "wide"), ("--latency", "x"), ("--step", "soon"),
     ("--params", "0"), ("--encoding", "x"), ("--spread", "2"), ("--fan-out", "0"),
     ("--density", "thin")],
)  # fmt: skip
def test_flags_are_checked_before_script_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, value: str
) -> None:
    """A script may take minutes to load its data, so flags are checked first."""
    script, trace = tmp_path / "mine.py", tmp_path / "ran"
    script.write_text(f"open({str(trace)!r}, 'w')\n{SCRIPT}")
    assert main(["scaling", "--measure", str(script), flag, value]) == 2
    name = flag.removeprefix("--").replace("-", "_")
    assert re.match(rf"sparkstrom scaling: (--)?{name}[ =]'?{value}", capsys.readouterr().err)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--params", "many"), "--params 'many': number 'many': write a whole number"),
        (("--params", "0"), "params=0"),
        (("--step", "soon"), "--step 'soon': duration 'soon': write 300ms"),
        (("--step", "0"), "step=0.0"),
        (("--density", "thin"), "--density 'thin'"),
        (("--density", "2"), "--density '2': must be a number above 0 and at most 1"),
        (("--params", "inf"), "--params 'inf': number 'inf': write a whole number"),
        (("--link", "wide"), "--link 'wide': rate 'wide': write it as tc does"),
        (("--link", "9" * 400 + "gbit"), "write it as tc does"),
        (("--link", "0.4bit"), "write it as tc does"),
        (("--latency", "-1ms"), "--latency"),
        (("--workers", "4..2"), "write 2..64 or 2,4,8"),
        (("--workers", "0"), "write 2..64 or 2,4,8"),
        (("--workers", "1..1e12"), "write 2..64 or 2,4,8"),
        (("--workers", "2.."), "--workers '2..': write 2..64 or 2,4,8"),
        (("--workers", "2-64"), "--workers '2-64': write 2..64 or 2,4,8"),
        (("--fan-out", "0"), "fan_out=0"),
        (("--spread", "1"), "spread=1.0"),
    ],
)
def test_invalid_flag_value_exits_with_2(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, str], words: str
) -> None:
    """An invalid value exits with code 2 and a message."""
    flag, value = flags
    assert main([*ASKED, f"{flag}={value}"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--step", "20min"), "1,200 s a step"),
        (("--step", "999.7ms"), "1 s a step"),
        (("--link", "999.9mbit"), "links of 1 Gbit/s"),
        (("--link", "2tbit"), "links of 2 Tbit/s"),
    ],
)
def test_large_values_have_no_exponents(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, str], words: str
) -> None:
    """Before, the text had 1.2e+03 s and 1e+03 Mbit/s."""
    assert main([*ASKED, *flags]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--params", "--step"])
def test_params_and_step_are_required(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """Without parameters or step time, the command exits with code 2."""
    at = ASKED.index(flag)
    assert main(ASKED[:at] + ASKED[at + 2 :]) == 2
    assert f"{flag} is required" in capsys.readouterr().err


def test_script_may_import_sibling_module_and_define_tensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Imports work as with ``python script.py``; the batch may have tensors, as of a DataLoader."""
    pytest.importorskip("torch")
    (tmp_path / "beside_it.py").write_text(SCRIPT)
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom beside_it import batch, model\nbatch = tuple(map(torch.tensor, batch))"
    )
    assert main(["scaling", "--measure", str(script), "--workers", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == 8 * 16 + 16 + 16 * 4 + 4


def rehearsed(directory: Path, density: float) -> Path:
    """Write the figures of a rehearsal to a file, as ``sparkstrom rehearse --json`` prints them."""
    times = {"step_s": 0.05, "jitter": 0.1, "encode_s": 0.002, "apply_s": 0.0}
    conditions = {"link_bits_s": 1e8, "latency_s": 0.003, "times": times}
    path = directory / "rehearsal.json"
    path.write_text(json.dumps({"n_params": 5e6, "density": density, "conditions": conditions}))
    return path


def test_from_flag_takes_missing_values_from_rehearsal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--from takes all values that are not given from a saved rehearsal."""
    played = rehearsed(tmp_path, density=0.004)
    assert main(["scaling", "--from", str(played), "--step", "70ms", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["params"] == 5_000_000
    assert (told["step_s"], told["density"], told["spread"]) == (0.07, 0.004, 0.1)
    assert (told["link_bits_s"], told["latency_s"], told["encoding_s"]) == (1e8, 0.003, 0.002)


def test_a_rehearsal_without_updates_has_no_density(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A single worker sends no updates. Before, the error blamed --density, which was not given."""
    command = ["scaling", "--from", str(rehearsed(tmp_path, density=0.0))]
    assert main(command) == 2
    words = "no worker of that rehearsal sent updates, so it has no density: give --density"
    assert words in capsys.readouterr().err
    assert main([*command, "--density", "1e-3"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{}", "it is not a rehearsal; write one with"),
        ("[", "not a rehearsal"),
    ],
)
def test_a_file_that_is_no_rehearsal_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, words: str
) -> None:
    """A file that is not a rehearsal exits with code 2 and a message."""
    path = tmp_path / "rehearsal.json"
    if text is not None:
        path.write_text(text)
    assert main(["scaling", "--from", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_script_may_remove_its_directory_from_sys_path(tmp_path: Path) -> None:
    """Before, the measurement was lost if a script removed its directory from ``sys.path``."""
    before = sys.path[:]
    with scaling._script_environment(tmp_path / "mine.py"):
        sys.path.remove(str(tmp_path))
    assert sys.path == before


def test_a_script_gets_no_arguments_of_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a script's argparse got the arguments of ``scaling --measure``."""
    script = tmp_path / "mine.py"
    parse = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    script.write_text(parse + SCRIPT)
    given = ["sparkstrom", "scaling", "--measure", str(script), "--workers", "2", "--json"]
    monkeypatch.setattr(sys, "argv", given)
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["params"] > 0
    assert sys.argv == given
