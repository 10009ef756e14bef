"""Tests that slow tests run only if all are wanted, or if the command names what to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import pytest_configure

Source = pytest.Config.ArgsSource


@pytest.mark.parametrize(
    ("given", "source", "expression"),
    [
        ({}, Source.TESTPATHS, "not slow"),
        ({}, Source.INVOCATION_DIR, "not slow"),
        ({}, Source.ARGS, ""),
        ({"all": True}, Source.TESTPATHS, ""),
        ({"keyword": "threshold"}, Source.TESTPATHS, ""),
        ({"markexpr": "flips"}, Source.TESTPATHS, "flips"),
    ],
)
def test_slow_tests_are_deselected_only_if_nothing_is_named(
    given: dict[str, Any], source: Source, expression: str
) -> None:
    option = SimpleNamespace(**({"all": False, "keyword": "", "markexpr": ""} | given))
    pytest_configure(cast(pytest.Config, SimpleNamespace(args_source=source, option=option)))
    assert option.markexpr == expression
