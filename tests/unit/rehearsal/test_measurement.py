"""Tests of a rehearsal's measured conditions: how the workers' measurements are combined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkstrom import ParallelWrapper, UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_sample import RowSample, sample_blocks
from sparkstrom.local.data import read_data_blocks
from sparkstrom.rehearsal.conditions import StepTimes
from sparkstrom.rehearsal.data import SampledData
from sparkstrom.rehearsal.measurement import (
    LinkMeasurement,
    WorkerMeasurement,
    count_rows_to_measure,
    summarize_workers,
)
from sparkstrom.spark.executor.rehearsal_measurement import check_barrier_stages
from tests.unit.rehearsal.recipes import make_network, make_recipe, make_sample, rows


def worker(host: str, step_s: float = 0.1, problem: str = "", **links: Any) -> WorkerMeasurement:
    times = StepTimes(step_s, 0.1, 1e-3, 1e-4)
    return WorkerMeasurement(
        host, times, {name: LinkMeasurement(*link) for name, link in links.items()}, problem
    )


def test_link_rate_is_fastest_stream_of_slowest_host() -> None:
    """Host a is slow in both directions; streams between the fast hosts b and c do not show it."""
    found = summarize_workers([
        worker("a", 0.1, b=(9e7, 1e-3), c=(8e7, 1e-3)),
        worker("b", 0.2, a=(9.5e7, 1e-3), c=(9e8, 3e-3)),
        worker("c", 0.3, a=(5e7, 1e-3), b=(7e8, 1e-3)),
        worker("c", 0.3),
    ])  # fmt: skip
    assert found.link_bits_s == pytest.approx(9.5e7)
    assert found.latency_s == pytest.approx(5e-4)
    assert found.times == StepTimes(0.25, 0.1, 1e-3, 1e-4)
    assert "by 4 workers on 3 hosts: a step takes 250 ms (100 to 300), links 95 Mbit/s" in (
        found.text
    )


def test_large_figures_are_written_without_exponents() -> None:
    """Before, the text had 1.2e+03 ms and 1.2e+03 Mbit/s."""
    found = summarize_workers([worker("a", 1.2, b=(1.2e9, 0.2)), worker("b", 1.2)])
    assert "takes 1200 ms (1200 to 1200), links 1200 Mbit/s, latency 100 ms" in found.text


def test_workers_on_one_host_give_no_link_figures() -> None:
    """Workers on one host give no link figures."""
    found = summarize_workers([worker("a"), worker("a")])
    assert (found.link_bits_s, found.latency_s) == (None, None)
    assert "on 1 host: a step takes 100 ms" in found.text
    assert "no link between hosts" in found.text


@pytest.mark.parametrize(
    ("problem", "words"), [("no port", "not measured: no port"), ("", "UDP is blocked")]
)
def test_unmeasured_links_are_reported_with_reason(problem: str, words: str) -> None:
    """No figure is returned, so that the default is used, and the text has the reason."""
    found = summarize_workers([worker("a", b=(None, None)), worker("b", problem=problem)])
    assert found.link_bits_s is None
    assert words in found.text


def test_unmeasured_host_is_mentioned_after_link_figures() -> None:
    """If some hosts were not measured, the text mentions it after the links' figures."""
    found = summarize_workers([
        worker("a", b=(1e8, 1e-3)), worker("b", a=(1e8, 1e-3)), worker("c", problem="no port"),
    ])  # fmt: skip
    assert found.link_bits_s == pytest.approx(1e8)
    assert found.text.endswith("latency 0.5 ms; some hosts were not measured: no port")


def test_measuring_task_gets_only_needed_row_blocks() -> None:
    """A sample for measuring has only as many blocks of rows as are trained on."""
    made = make_recipe()
    assert count_rows_to_measure(made) == 40 * 8
    chosen = make_sample()
    assert chosen.head(1).rows == len(chosen.blocks[0].records)
    assert chosen.head(10**6) == chosen


def make_sample_with_held_column(held: np.ndarray) -> RowSample:
    """Return a sample of some blocks with a column that marks held-out rows."""
    features, labels = (array[: len(held)] for array in rows())
    table = pa.table({"x": [*features], "y": labels, "held": held})
    chosen = ColumnSpec("x", "y", None, "held")
    parts = (table.slice(begin, 20) for begin in range(0, len(held), 20))
    blocks = [block for part in parts for block in read_data_blocks(part, chosen)]
    return sample_blocks(blocks, len(held), 0)


def test_measuring_skips_rows_held_out_by_column() -> None:
    """Rows that a column marks as held out are not used for measuring."""
    chosen = make_sample_with_held_column(np.arange(100) < 50).head(25)
    assert (chosen.rows, chosen.total) == (80, 100)
    assert SampledData(make_recipe(), chosen).partitions(1)[0].rows == 30


def test_sample_with_all_rows_held_out_raises_usage_error() -> None:
    """A sample whose rows are all held out raises ``UsageError``."""
    with pytest.raises(UsageError, match=r"no rows to train on; check .* what validation holds"):
        SampledData(make_recipe(), make_sample_with_held_column(np.ones(40, bool))).check()


def test_measuring_rejects_dynamic_allocation() -> None:
    """Measuring with dynamic allocation of executors raises ``UsageError``."""
    context = SimpleNamespace(_conf={"spark.dynamicAllocation.enabled": "true"})
    with pytest.raises(UsageError, match=r"spark\.dynamicAllocation\.enabled=false"):
        check_barrier_stages(context)


def test_parallel_wrapper_rejects_measure_option() -> None:
    """``measure=True`` is refused by a ``ParallelWrapper``, which has no cluster."""
    with (
        ParallelWrapper(make_network(), workers=2, progress=False) as wrapper,
        pytest.raises(UsageError, match="measure=True: these workers are processes"),
    ):
        wrapper.rehearse(rows(), measure=True)
