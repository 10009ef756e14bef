"""On a real YARN in both modes: equal replicas and exit code 0; a failure is exit code 1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.several_examples import read_answers

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SEVERAL = ROOT / "scripts/several_examples.py"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "examples"),
    [("client", ["digits.py --epochs 5"]), ("cluster", ["torch_digits.py"])],
)
def test_examples_end_with_equal_replicas(cluster, udp_range, mode, examples) -> None:
    """One application runs them. digits.py in cluster mode: test_packed_environment.py."""
    conf = {"spark.executor.cores": "1", **udp_range.conf()}
    commands = [str(ROOT / "examples" / example) for example in examples]
    with udp_range.watched():
        done = cluster.submit(SEVERAL, *commands, conf=conf, mode=mode)
    told = done.output + done.container_logs
    assert done.exit_code == 0, told
    answers = read_answers(told)
    assert [answer["command"] for answer in answers] == commands
    for answer in answers:
        assert answer["status"] == 0, told
        found = re.findall(r"^hash (\S+) +([0-9a-f]{16})$", answer["printed"], re.MULTILINE)
        hashes = dict(found)
        assert len(hashes) == 3, told  # two workers and the driver
        assert len(set(hashes.values())) == 1
    assert len(udp_range.seen) >= 3  # more where a media driver begins anew


def test_an_exception_in_training_fails_the_application_with_its_cause_in_the_log(cluster) -> None:
    done = cluster.submit(HERE / "burning_job.py", conf={"spark.executor.instances": "1"})
    assert done.exit_code == 1, done.output
    assert "RuntimeError: the reactor is on fire" in done.container_logs
    assert "step" in done.container_logs
