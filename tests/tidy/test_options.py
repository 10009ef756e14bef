"""Tests that each option has a test which changes the option and sees an effect.

Such a test is marked with ``@pytest.mark.flips("SharedTrainingMaster.max_lead")``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from pathlib import Path

import pytest

from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import ALGORITHMS
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster

TESTS = Path(__file__).parents[1]

OPTIONS = [
    f"{owner.__name__}.{option.name}"
    for owner in (
        *ALGORITHMS,
        ParameterAveragingTrainingMaster,
        ResidualClipping,
        SharedTrainingMaster,
        VoidConfiguration,
        WarmUp,
    )
    for option in dataclasses.fields(owner)
    if option.init and option.name != "void"  # its fields are options of their own
]


@functools.cache
def flipped_options() -> set[str]:
    """Return the options that are named in ``flips`` marks of the tests."""
    return {
        str(argument.value)
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.flips"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_option_has_test_marked_flips(option: str) -> None:
    """A test is marked as flipping the option; only readers can tell that it sees a difference."""
    assert option in flipped_options()


def test_flips_marks_name_existing_options() -> None:
    """Each ``flips`` mark names an existing option."""
    assert flipped_options() - set(OPTIONS) == set()
