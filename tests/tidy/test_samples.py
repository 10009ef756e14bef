"""Tests that samples in conf/ are valid, and that the table for users of DL4J is complete."""

from __future__ import annotations

import dataclasses
import json
import logging
import logging.config
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkstrom.options import gradient_sharing as training_master
from sparkstrom.options import network as discovery
from sparkstrom.options import parameter_averaging as averaging_master
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.options.resolution import resolve

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def parse_properties(path: Path) -> dict[str, str]:
    """Parse Spark's format of properties: a key, blanks and a value; # begins a comment line."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return {
        key: value
        for line in lines
        if line and not line.startswith("#")
        for key, value in [line.split(maxsplit=1)]
    }


def test_spark_defaults_sample_sets_options() -> None:
    master = resolve(SharedTrainingMaster(), parse_properties(CONF / "spark-defaults.conf"), {})
    assert master.void.network_mask == "10.0.0.0/16"
    assert master.void.controller_ports() == range(40123, 40124)
    assert master.void.executor_ports() == range(40123, 40187)
    assert master.threshold == "auto"
    assert master.min_workers == 8


def test_laptop_sample_has_only_spark_keys() -> None:
    keys = parse_properties(CONF / "laptop.conf")
    assert all(key.startswith("spark.") for key in keys)
    assert resolve(SharedTrainingMaster(), keys, {}) == SharedTrainingMaster()
    options = keys["spark.driver.extraJavaOptions"].split()
    log = [option.partition("=")[2] for option in options if option.startswith("-Dlog4j2")]
    assert (ROOT / log[0]).is_file()


def test_emr_sample_sets_port_range_option() -> None:
    classes = json.loads((CONF / "emr/configurations.json").read_text())
    defaults = {entry["Classification"]: entry["Properties"] for entry in classes}["spark-defaults"]
    assert resolve(SharedTrainingMaster(), defaults, {}).void.port_range == (40123, 40186)


@pytest.fixture
def our_logger() -> Iterator[logging.Logger]:
    """Return the logger "sparkstrom"; restore its settings after the test."""
    logger = logging.getLogger("sparkstrom")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def test_logging_sample_configures_sparkstrom_logger(our_logger: logging.Logger) -> None:
    logging.config.dictConfig(tomllib.loads((CONF / "logging.toml").read_text()))
    assert our_logger.level == logging.INFO
    assert len(our_logger.handlers) == 1


def option_names() -> set[str]:
    """Return all names of options: ours, DL4J's aliases, and refused ones."""
    ours = {
        option.name
        for owner in (ParameterAveragingTrainingMaster, SharedTrainingMaster, VoidConfiguration)
        for option in dataclasses.fields(owner)
        if option.init
    }
    return (
        ours
        | training_master.REFUSED.keys()
        | discovery.REFUSED.keys()
        | training_master.ALIASES.keys()
        | averaging_master.REFUSED.keys()
        | averaging_master.ALIASES.keys()
    )


@pytest.mark.parametrize("name", sorted(option_names()))
def test_dl4j_page_has_every_option_name(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs/from-dl4j.md").read_text()
