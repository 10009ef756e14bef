"""What these tests share: XLA compiles their small functions quickly, and not well."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_to_compile() -> Iterator[None]:
    """Most of a test on JAX is compilation, and nothing in it runs for long."""
    jax = sys.modules.get("jax")
    if jax is None:
        yield
        return
    before = jax.config.jax_disable_most_optimizations
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
