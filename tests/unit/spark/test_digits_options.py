"""Tests of examples/digits.py: its command line takes precedence over Spark's configuration."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="not installed: pip install 'sparkstrom[examples]'")

from sparkstrom.options.resolution import resolve

DIGITS = runpy.run_path(str(Path(__file__).parents[3] / "examples/digits.py"))
CONF = {
    "spark.sparkstrom.network_mask": "10.78.0.0/16",
    "spark.sparkstrom.unicast_port": "40123",
    "spark.sparkstrom.controller_address": "10.78.0.1",
    "spark.sparkstrom.workers_per_node": "4",
}


def test_missing_options_come_from_spark_configuration() -> None:
    """Options missing on the command line are read from Spark's configuration."""
    args = DIGITS["parser"]().parse_args([])
    master = resolve(DIGITS["master_of"](args), CONF, {})
    void = master.void
    assert (void.network_mask, void.unicast_port) == ("10.78.0.0/16", 40123)
    assert (void.controller_address, master.workers_per_node) == ("10.78.0.1", 4)


def test_command_line_overrides_spark_configuration() -> None:
    """Options on the command line override Spark's configuration."""
    words = "--mask 10.0.0.0/16 --port 50000 --controller 10.0.0.1 --workers-per-node 2"
    args = DIGITS["parser"]().parse_args(words.split())
    master = resolve(DIGITS["master_of"](args), CONF, {})
    void = master.void
    assert (void.network_mask, void.unicast_port) == ("10.0.0.0/16", 50000)
    assert (void.controller_address, master.workers_per_node) == ("10.0.0.1", 2)
