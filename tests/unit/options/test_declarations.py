"""Tests that each option is declared once, and that docstrings and defaults agree with this."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sparkstrom.base.option_types import KEY
from sparkstrom.options.common import DOC, LOCAL, LOCAL_ROUNDS, CommonOptions, options_in
from sparkstrom.options.resolution import NESTED, OPTION_CLASSES

OPTIONS = [
    pytest.param(cls, option, id=f"{cls.__name__}.{option.name}")
    for cls in OPTION_CLASSES
    for option in options_in(cls)
]


def text_of(value: Any) -> str:
    """Return a value in the form that Spark's configuration has."""
    return (
        value if isinstance(value, str) else repr(value).lower() if value is None else repr(value)
    )


@pytest.mark.parametrize("cls", OPTION_CLASSES)
def test_declared_options_equal_constructor_parameters(cls: Any) -> None:
    """The declared options are exactly the constructor's parameters."""
    names = [each.name for each in dataclasses.fields(cls) if each.init]
    assert [each.name for each in options_in(cls)] == names


@pytest.mark.parametrize(("cls", "option"), OPTIONS)
def test_option_has_valid_values_and_text_in_docstring(cls: Any, option: Any) -> None:
    """Each option has a description of valid values; the class's docstring contains its text."""
    assert option.metadata[KEY].wanted
    assert option.metadata[LOCAL] or not option.metadata[LOCAL_ROUNDS]
    documented = " ".join(cls.__doc__.split())
    assert f"{option.name}: {' '.join(option.metadata[DOC].split())}" in documented


@pytest.mark.parametrize(("cls", "option"), OPTIONS)
def test_default_is_valid_and_survives_text_form(cls: Any, option: Any) -> None:
    """A default is valid, and its text form is parsed to the same value."""
    kind = option.metadata[KEY]
    assert kind.read(option.name, option.default) == option.default
    if option.name != NESTED:  # it has options of its own
        read = kind.read(option.name, kind.from_text(option.name, text_of(option.default)))
        assert read == option.default


@pytest.mark.parametrize("cls", OPTION_CLASSES)
def test_option_class_redeclares_no_common_option(cls: Any) -> None:
    """A class redeclares no common option, with one exception."""
    if issubclass(cls, CommonOptions):
        again = {each.name for each in options_in(CommonOptions)} & set(cls.__annotations__)
        assert again <= {"repartition"}  # averaging has one more choice
