"""Tests of docs/options.md: it is up to date, and explains for each option when to change it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY
from sparkstrom.local.parallel_wrapper import ParallelWrapper
from sparkstrom.local.wrapper_options import WrapperOptions
from sparkstrom.options.common import DOC, WHEN, options_in
from sparkstrom.options.resolution import ENVIRONMENT_PREFIX, NESTED, OPTION_CLASSES, PREFIX
from sparkstrom.spark.network import SparkNetwork

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = [
    pytest.param(owner, option, id=f"{owner.__name__}.{option.name}")
    for owner in (*OPTION_CLASSES, WrapperOptions)
    for option in options_in(owner)
]


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("option_pages", DOCS / "option_pages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


option_pages = load_generator()


def test_options_page_equals_generator_output() -> None:
    written = (DOCS / "options.md").read_text()
    assert written == option_pages.page(), "run: python docs/option_pages.py > docs/options.md"


@pytest.mark.parametrize(("owner", "option"), OPTIONS)
def test_option_has_text_on_when_to_change(owner: type, option: Any) -> None:
    when, page = option.metadata[WHEN], option_pages.page()
    assert when[:1].isupper() or when.startswith('"')
    assert when.endswith((".", ")."))
    assert f"**When to change it:** {option_pages.to_markdown(when)}" in page
    assert not option.metadata[DOC].endswith(".")
    assert f"### `{option.name}`" in page
    if owner is not WrapperOptions and option.name not in option_pages.IN_CODE_ONLY:
        assert f"`{PREFIX}{option.name}`" in page
        assert f"`{ENVIRONMENT_PREFIX}{option.name.upper()}`" in page


@pytest.mark.parametrize(("owner", "option"), OPTIONS)
def test_option_describes_valid_values(owner: type, option: Any) -> None:
    values = option.metadata[KEY].values
    assert values
    assert not values.startswith(("must", "is ", "such as"))


@pytest.mark.parametrize(("owner", "option"), OPTIONS)
def test_class_docstring_has_option_texts(owner: type, option: Any) -> None:
    """The docstring of an option's class has its texts; ``progress`` refers to SparkNetwork's."""
    shown = ParallelWrapper if owner is WrapperOptions else owner
    documented = " ".join((shown.__doc__ or "").split())
    if owner is WrapperOptions and option.name == "progress":
        assert "``progress`` is as in ``SparkNetwork``" in documented
        documented = " ".join((SparkNetwork.__doc__ or "").split())
        assert "progress: Whether or how to show progress:" in documented
        return
    assert f"{option.name}: {option.metadata[DOC]}. {option.metadata[WHEN]}" in documented


def test_wrapper_option_defaults_match_constructor() -> None:
    parameters = inspect.signature(ParallelWrapper).parameters
    for option in options_in(WrapperOptions):
        if option.name != "progress":  # one of **options
            assert parameters[option.name].default == option.default


def test_code_only_option_rejects_text() -> None:
    kinds = {
        option.name: option.metadata[KEY]
        for owner in OPTION_CLASSES
        for option in options_in(owner)
        if option.name in option_pages.IN_CODE_ONLY and option.name != NESTED
    }
    assert kinds
    for name, kind in kinds.items():
        with pytest.raises(UsageError):
            kind.read(name, kind.from_text(name, "median"))
