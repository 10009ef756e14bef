"""Import torch's compiler, ``torch._dynamo``, only in processes that use it.

Creating the first optimizer and taking its first step import ``torch._dynamo``, only to exclude
their own code from compilation (``torch.optim.optimizer._use_grad_for_differentiable`` and
``torch._compile._disable_dynamo``). In a process that compiles nothing, the import takes as much
processor time as that of torch itself, and every worker of a fit would pay for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"


def defer_compiler_import() -> None:
    """Have torch's optimizers import the compiler only if other code has imported it.

    Until then, a ``DeferredCompiler`` is in the compiler's place.
    """
    if COMPILER in sys.modules:
        return
    spec = importlib.util.find_spec(COMPILER)
    if spec is None:  # a version of torch without it
        return
    deferred = DeferredCompiler(COMPILER)
    deferred.__spec__, deferred.__file__, deferred.__loader__ = spec, spec.origin, spec.loader
    if sys.modules.setdefault(COMPILER, deferred) is deferred:
        torch._dynamo = deferred


class DeferredCompiler(ModuleType):
    """A replacement for ``torch._dynamo`` with only the functions that torch's optimizers call.

    The first use of anything else imports the real module, which is used from then on.
    ``graph_break``, and ``disable`` as the optimizers call it, only concern code that is being
    compiled, which requires the real module. Until that is imported, they have no effect.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Pickle as the real module, which cloudpickle includes with functions that name it."""
        return importlib.import_module, (COMPILER,)

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Call ``torch._dynamo.graph_break`` if the compiler has been imported."""
        if sys.modules.get(COMPILER) is not self:
            self._import().graph_break(*args, **options)

    def disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """Return what ``torch._dynamo.disable(function, ...)`` returns.

        For a function of torch's optimizers, return a function that calls it directly until the
        compiler is imported. These are recognized by the option ``wrapping=False``, which torch
        uses only inside (``torch._compile._disable_dynamo``).
        """
        if not isinstance(function, FunctionType) or options.get("wrapping", True):
            return self._import().disable(function, *args, **options)
        disabled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*call_args: Any, **call_options: Any) -> Any:
            nonlocal disabled
            if sys.modules.get(COMPILER) is self:
                return function(*call_args, **call_options)
            if disabled is None:
                disabled = self._import().disable(function, *args, **options)
            return disabled(*call_args, **call_options)

        return call

    def __getattr__(self, name: str) -> Any:
        """Import the compiler and return its attribute ``name``."""
        # ``inspect`` and others look for such attributes in every module.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {COMPILER!r} has no attribute {name!r}")
        return getattr(self._import(), name)

    def _import(self) -> Any:
        """Return the real module."""
        with self._lock:
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER]
        return importlib.import_module(COMPILER)
