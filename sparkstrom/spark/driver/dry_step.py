"""Dry step: a fit's first rows tried on a copy of its model, in this program, before any work.

A wrong shape, dtype, label or loss shows in about a second, where workers would be asked first for
ten. It is a courtesy: only what a worker would refuse with a UsageError counts, too. Rows that are
not there at once, models with code of the user's own around them, and large ones are not tried.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

import numpy as np

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.models.base import Buffered, Epochal, Flat, FlatModel, Paced
from sparkstrom.models.outputs import measured
from sparkstrom.spark.data.row_blocks import Block, check_block
from sparkstrom.spark.driver.pickling import Pack

log = logging.getLogger(__name__)

ROWS = 8  # of a dry step: real ones, repeated where there are fewer
PARAMETERS_MAX = 20_000_000  # a copy is made of them, and the optimizer's state
ONE_ROW = "more than 1 value per channel"  # what BatchNorm says of parts of one row


def try_step(
    model: FlatModel,
    parameters: Flat,
    first: Callable[[], Iterable[Block]] | None,
    pack: Pack,
    metric: str | None = None,
) -> None:
    """Train a copy of the model on the first rows, once; this program's own stays as it is.

    ``first`` gives the rows; ``metric``: what is measured on held-out rows, None for nothing.
    Raise UsageError where rows, model and loss do not fit together.
    """
    if first is None or not _is_tried(model):
        return
    try:
        with undisturbed():
            block = next(iter(first()), None)
            if block is not None and len(block.records):
                _try(model, parameters, block, pack, metric)
    except UsageError as error:
        if ONE_ROW not in str(error):
            raise
    except Exception as error:  # workers will say what it is, if it is anything
        log.info("the dry step before the fit was left out: %s", first_line(error))


def _is_tried(model: FlatModel) -> bool:
    own = type(model).__module__.startswith("sparkstrom.")
    return own and model.n_params <= PARAMETERS_MAX


def _try(model: FlatModel, parameters: Flat, block: Block, pack: Pack, metric: str | None) -> None:
    """What a worker does with its first rows."""
    twin: FlatModel = pickle.loads(pack(model))
    block = block._replace(records=block.records[:ROWS], numbers=block.numbers[:ROWS])
    check_block(twin, block)
    twin.bind(parameters.copy())
    if isinstance(model, Buffered) and isinstance(twin, Buffered):
        buffers = model.buffers_bytes()
        if buffers:
            twin.load_buffers_bytes(buffers)
    batch = block.form.batch(np.resize(block.records, (ROWS, block.records.shape[1])))
    if isinstance(twin, Epochal):
        twin.stand_at(0, 0, 1)
    if isinstance(twin, Paced):
        twin.keep_pace(1, 0, 0)
    twin.step(batch)
    if metric is not None:
        measured(twin, batch, metric)


class _MutedForThread:
    """A text stream that drops what the creating thread writes and forwards all else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# Standard output, warning filters and random states belong to the whole process: two fits at the
# same time, as in a cross-validation, would restore them in the wrong order.
_process_state = threading.Lock()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore random states and warning filters afterwards; drop what this thread prints."""
    with _process_state, contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if (torch := sys.modules.get("torch")) is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if sys.stdout is not None:  # it is None in a program that was started without one
            muted = cast(TextIO, _MutedForThread(sys.stdout))
            stack.enter_context(contextlib.redirect_stdout(muted))
        stack.enter_context(np.errstate(all="ignore"))
        yield
