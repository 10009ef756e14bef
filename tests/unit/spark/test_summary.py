"""Tests of the summary of a fit, computed from known counters of two workers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.codec.messages import Phase
from sparkstrom.codec.sealed_frames import Rejection
from sparkstrom.fit.early_stopping_listener import Best
from sparkstrom.fit.events import FinishedFit
from sparkstrom.fit.summary import (
    Fault,
    FitFacts,
    FitRecord,
    TrainingSummary,
    summarize,
    summary_from_json,
    summary_to_json,
)
from sparkstrom.observe.epoch_history import Epoch
from sparkstrom.observe.telemetry import LinkBytes, from_wire
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.protocol.common.events_and_effects import IgnoreReason, TaskEnding
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import Departure
from sparkstrom.runtime.master_control import FitOutcome
from sparkstrom.runtime.message_endpoint import Traffic
from sparkstrom.runtime.trainer_thread import RESIDUAL_PERCENTILES

ROOT = Path(__file__).parents[3]

STATS = {
    "partition": 0.0,
    "rows_held_out": 7.0,
    "spilled_bytes": 8.0,
    "epoch": 1.0,
    "examples": 100.0,
    "last_loss_sum": 30.0,
    "last_loss_weight": 60.0,
    "publications": 10.0,
    "hits": 50.0,
    "mass_clipped": 1.0,
    "mass_scaled": 2.0,
    "mass_left": 4.0,
    "mass_waited": 6.0,
    "residual_square": 9.0,
    "tau": 0.01,
    "update_bytes": 1000.0,
    "wire_driver 10.0.0.1:7/42": 1500.0,
    "wire_own": 20.0,
    "rejected": 1.0,
    "s_stepping": 2.5,
    "r_tau": 0.01,
    "r_at_least_tau": 0.0,
    "r_mean": 0.1,
    "r_max": 0.25,
    **{f"r_p{percentile:g}": 0.2 for percentile in RESIDUAL_PERCENTILES},
}
OTHER = STATS | {
    "partition": 1.0,
    "last_loss_sum": 6.0,
    "last_loss_weight": 12.0,
    "residual_square": 16.0,
    "tau": 0.03,
}


def outcome(**changes: Any) -> FitOutcome:
    """Return the outcome of a fit with two workers, with changed fields."""
    facts: dict[str, Any] = {
        "hashes": {"1": "aa", "2": "aa", "driver": "aa"},
        "minibatches": 20,
        "minibatches_expected": 20,
        "commits": 18,
        "staleness": Counter({0: 10, 3: 8}),
        "staleness_minibatches": 1.5,
        "staleness_minibatches_max": 3.0,
        "stats": {1: STATS, 2: OTHER},
        "traffic": Traffic(wire_bytes=999, rejected=Counter({"x": 3})),
        "wire": LinkBytes({"10.0.0.9:7/42": 400.0}, 5.0),
        "ignored": Counter(),
        "departures": [
            Departure(3, 1, "h", "silent", 14.0),
            Departure(1, 0, "h", "done", 18.0, TaskEnding.DONE),
        ],
        "hosts": {1: "h", 2: "g", 3: "h"},
        "slow_links": (),
        "notes": ["a note"],
        "kept": {},
        "lost_mass": 0.5,
        "grants": 1,
        "phase_began_s": {
            Phase.RUNNING: 12.0,
            Phase.DRAINING: 15.0,
            Phase.AUDIT: 16.0,
            Phase.DONE: 18.0,
        },
        "overflows": 0,
        "first_overflow": -1,
        "stop_reason": None,
        "rows": [50, 50],
        "executors": {"e0"},
    }
    facts |= changes
    told = {node: from_wire(values) for node, values in facts["stats"].items()}
    return FitOutcome(**(facts | {"stats": told}))


def summary(
    collect_stats: bool = True,
    horizons: Any = None,
    reports: Any = (),
    validation: str | float | None = None,
    **changes: Any,
) -> TrainingSummary:
    """Return the summary of this outcome, with one epoch in its history."""
    spec = FitSpec(workers=2, epochs=2, n_params=100, version="1")
    end = FinishedFit(spec, outcome(**changes), reports, [Epoch(1, 0.5, 72, 0.25, 2)])
    facts = FitFacts(
        record=FitRecord(10.0, 11.0, 20.0, end),
        executors=1,
        warnings=["a warning"],
        master=SharedTrainingMaster(collect_training_stats=collect_stats),
        best=Best(1, "loss", 0.25, 17),
        horizons=horizons or {},
        validation=validation,
    )
    return summarize(facts)


def test_table_names_best_epoch_and_delivered_commit() -> None:
    """The table has the best epoch, its loss, and the commit of the delivered parameters."""
    made = summary()
    assert made.history[0].validation == made.best.value
    assert "best epoch          1 (loss 0.2500, parameters of commit 17)" in made.table()


@pytest.mark.parametrize(("finished", "is_told"), [(None, True), (0, True), (1, False)])
def test_warns_if_held_out_rows_were_not_fully_evaluated(
    finished: int | None, is_told: bool
) -> None:
    """A warning is given if a worker with only held-out rows did not finish evaluating them."""
    trains = STATS | {"finished": 1.0, "held_weight": 0.0}
    own = {} if finished is None else {"finished": float(finished), "held_weight": 7.0}
    measures = {"partition": 1.0, "rows_held_out": 7.0, **own}
    made = summary(stats={1: trains, 2: measures}, rows=[50, 0]).warnings
    found = [text for text in made if "partition 1 has only held-out rows" in text]
    assert len(found) == is_told


def test_warns_if_all_held_out_rows_weigh_0() -> None:
    """A warning is given if no worker's held-out rows have a weight."""
    nothing = STATS | {"finished": 1.0, "held_weight": 0.0}
    some = OTHER | {"finished": 1.0, "held_weight": 2.0}
    stats = {1: nothing, 2: nothing | {"partition": 1.0}}
    said = [text for text in summary(stats=stats, validation=0.1).warnings if "all weigh 0" in text]
    assert len(said) == 1
    for quiet in (
        summary(stats={1: nothing, 2: some}, validation=0.1),
        summary(stats={1: STATS, 2: OTHER}, validation=0.1),  # no epoch has ended
        summary(stats=stats, validation=None),
    ):
        assert not [text for text in quiet.warnings if "all weigh 0" in text]


def test_warns_if_validation_selects_no_rows() -> None:
    none, some = STATS | {"rows_held_out": 0.0}, STATS | {"rows_held_out": 3.0}
    assert (
        "validation selects no rows" in summary(validation="is_test", stats={1: none}).warnings[-1]
    )
    for quiet in (
        summary(validation="is_test", stats={1: none, 2: some}),
        summary(validation=0.0, stats={1: none}),
        summary(validation=0.1, stats={1: none}, minibatches=0),
    ):
        assert not [text for text in quiet.warnings if "validation" in text]


def test_table_has_line_of_rescaled_momentum() -> None:
    """The table has a line about rescaled momentum and schedules, if there are any."""
    horizons = {"workers": 4, "momentum": "0.9 -> 0.6561", "scheduler": "by the fit"}
    line = "horizons            4 workers: momentum 0.9 -> 0.6561, scheduler by the fit"
    assert line in summary(horizons=horizons).table()
    assert "horizons" not in summary().table()


def test_figures_are_computed_from_counters() -> None:
    """Figures are sums, means or ratios of the workers' and the driver's counters."""
    made = summary()
    assert made.replicas_equal
    assert made.loss == 36 / 72
    assert made.bytes_sent == 2000
    assert made.bytes_wire == 1500 + 2 * 20 + 400 + 5  # the shared media driver counts once
    assert made.bytes_dense == 20 * 400
    assert made.examples == 200
    assert (made.rows, made.rows_trained, made.rows_held_out) == (114, 100, 14)
    assert made.spilled_bytes == 16
    assert made.sent_fraction == 100 / (20 * 100)
    assert made.residual_norm == 5.0
    assert (made.mass_clipped, made.mass_scaled_away, made.mass_lost) == (2.0, 4.0, 0.5)
    assert made.tau == pytest.approx(0.02)
    assert (made.staleness_mean, made.staleness_max) == (24 / 18, 3)
    assert (made.staleness_minibatches, made.staleness_minibatches_max) == (1.5, 3.0)
    assert made.residual_minibatches == 2 * 12 / 8
    words = "1.5 minibatches of others (max 3), 1.3 commits (max 3); 3 more in residuals"
    assert f"staleness           {words}" in made.table()
    assert made.rejected_frames == 5
    assert made.departures == ["node 3 (partition 1 on h): silent"]
    assert made.warnings == ["a warning", "a note"]


def test_unsent_changes_of_dismissed_tasks_are_lost_mass() -> None:
    """Changes that dismissed tasks had not sent are added to the lost mass."""
    assert summary(reports=['{"mass_dismissed": 1.5}', '{"mass_dismissed": 0}']).mass_lost == 2.0


def test_first_three_worker_warnings_are_shown() -> None:
    """The first three warnings of the tasks' reports are shown, with the number of all."""
    texts = ["[]", '["a"]', '["b"]', '["c", "d"]']
    reports = [f'{{"mass_dismissed": 0, "warnings": {each}}}' for each in texts]
    assert summary(reports=reports[:3]).warnings[-2:] == ["a", "b"]
    made = summary(reports=reports)
    assert made.warnings[-3:] == ["a", "b", "c (such warnings of workers: 4)"]


def test_phase_seconds_add_up_to_total() -> None:
    made = summary()
    assert made.phase_seconds == {
        "prepare": 1.0,
        "start": 1.0,
        "train": 3.0,
        "drain": 1.0,
        "audit": 2.0,
        "end": 2.0,
    }
    assert sum(made.phase_seconds.values()) == made.seconds == 10.0


@pytest.mark.parametrize(
    "changes",
    [
        {"hashes": {"1": "aa", "driver": "bb"}},
        {"overflows": 2, "first_overflow": 7},
        {"stats": {1: STATS | {"breaches": 1.0}}},
    ],
)
def test_replicas_unequal_on_hash_mismatch_overflow_or_breach(changes: dict[str, Any]) -> None:
    """Replicas are not equal if hashes differ, a parameter overflowed, or a breach was counted."""
    assert summary().replicas_equal
    assert not summary(**changes).replicas_equal


def test_overflow_warning_suggests_lower_learning_rate() -> None:
    text = summary(overflows=2, first_overflow=7).warnings[-1]
    assert "2 times a parameter (first: index 7)" in text
    assert "Lower the learning rate" in text


def test_warns_if_no_parameter_changed() -> None:
    """A warning is given if no parameter changed, or if all changes stayed below the threshold."""
    still = STATS | {"hits": 0.0, "residual_square": 0.0}
    assert "no minibatch changed a parameter" in summary(stats={1: still, 2: still}).warnings[-1]
    quiet = STATS | {"hits": 0.0}
    text = summary(stats={1: quiet, 2: still}).warnings[-1]
    assert "below its threshold (at the end 1.00e-02)" in text
    assert summary(stats={1: STATS, 2: still}).warnings == ["a warning", "a note"]
    assert summary(stats={1: still}, minibatches=0).warnings == ["a warning", "a note"]


def test_warns_of_counters_unknown_to_driver() -> None:
    text = summary(stats={1: STATS | {"of_tomorrow": 1.0}, 2: OTHER}).warnings[-1]
    assert "1 counters that this driver does not know" in text
    assert "of_tomorrow" in text


def test_worker_times_require_collect_training_stats() -> None:
    """Times by worker need collect_training_stats; encoding statistics are shown if reported."""
    assert summary().worker_seconds == {"1": {"stepping": 2.5}, "2": {"stepping": 2.5}}
    assert summary(collect_stats=False).worker_seconds == {}
    assert summary().encoding.keys() == {"1", "2"}
    assert summary().encoding["1"] == {
        "tau": 0.01,
        "at_least_tau": 0.0,
        "mean": 0.1,
        "max": 0.25,
        **dict.fromkeys(("p50", "p95", "p99", "p99.9", "p99.99"), 0.2),
    }
    assert summary(stats={1: {"examples": 1.0}}).encoding == {}


def test_summary_of_fit_without_updates_has_figures() -> None:
    made = summary(stats={}, staleness=Counter(), commits=0)
    assert math.isnan(made.loss)
    assert (made.sent_fraction, made.staleness_mean, made.staleness_max) == (0.0, 0.0, 0)
    assert "inf x" in made.table()


def test_table_has_all_hashes_and_equality_in_last_line() -> None:
    """The table has all hashes, and whether the replicas are equal in its last line."""
    lines = summary().table().splitlines()
    assert sum(line.startswith("hash ") for line in lines) == 3
    assert lines[-1].split() == ["replicas", "equal", "True"]


# -- as pages and as a dictionary ----------------------------------------------------------------


def test_summary_dictionary_survives_json_round_trip() -> None:
    made = summary(stats={1: {"partition": 0.0, "examples": 1.0}}).to_dict()
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["loss"] is None  # no worker has finished an epoch
    assert (made["staleness"], made["staleness_max"]) == ({"0": 10, "3": 8}, 3)
    assert made["history"][0]["validation"] == 0.25
    assert made["best"]["commit"] == 17


def test_summary_survives_checkpoint_round_trip() -> None:
    made = summary()
    assert summary_from_json(json.loads(json.dumps(summary_to_json(made)))) == made


def test_page_of_resumed_fit_names_checkpoints() -> None:
    """The page of a resumed fit has its checkpoints and the minibatches before the resume."""
    resumed = replace(summary(), resumed_from="/c/7", minibatches_resumed=5, checkpoint="/c/9")
    made = resumed.table(all=True)
    assert "resumed from      /c/7" in made
    assert "20 of 20, each counted once, 5 of them before it was resumed" in made
    assert "checkpoint        /c/9" in made


def test_report_docs_explain_exactly_summary_keys() -> None:
    """The table in docs/report.md explains exactly the keys of the summary's dictionary."""
    page = (ROOT / "docs/report.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert explained == set(summary().to_dict())


def test_effective_batch_counts_only_workers_with_rows() -> None:
    """The effective batch has one minibatch of each worker that has rows."""
    made = summary(rows=[50, 0, -1, 7])
    assert (made.batch_size_per_worker, made.effective_batch) == (32, 64)
    assert "32 rows per step; 64 in a round of 2 workers" in made.table(all=True)


def test_bytes_by_kind_sum_driver_and_workers() -> None:
    """Bytes by kind of message are summed over driver and workers, the largest first."""
    told = STATS | {"kind_updates": 5.0, "kind_control": 1.0}
    traffic = Traffic(by_kind=Counter({"control": 7, "commits": 3}))
    made = summary(stats={1: told, 2: told}, traffic=traffic)
    assert made.bytes_by_kind == {"updates": 10, "control": 9, "commits": 3}
    assert list(made.bytes_by_kind) == ["updates", "control", "commits"]  # the largest first


def test_ignored_messages_are_counted_by_reason() -> None:
    """Ignored messages are counted by reason, over all kinds; those of workers only in total."""
    ignored = Counter({("Update", IgnoreReason.STRANGER): 5, ("Leaving", IgnoreReason.STRANGER): 4})
    ignored["Heartbeat", IgnoreReason.LATE] = 2
    made = summary(ignored=ignored, stats={1: STATS | {"ignored": 3.0}})
    assert made.ignored_messages == {"stranger": 9, "on_workers": 3, "late": 2}
    assert "messages ignored  14: 9 stranger, 3 on workers, 2 late" in made.table(all=True)
    assert made.to_dict()["ignored_messages"]["stranger"] == 9
    assert "messages ignored" not in summary().table(all=True)


def test_older_summary_without_ignored_messages_is_readable() -> None:
    """A saved summary of an older version, without ignored messages, can be read."""
    told = summary_to_json(summary())
    del told["ignored_messages"]
    assert summary_from_json(told) == summary()


def test_each_worker_has_figures_even_without_counters() -> None:
    """Each worker has its figures, also one that has reported no counters."""
    first, second = summary().per_worker
    assert (first.node, first.partition, first.host) == (1, 0, "h")
    assert (second.node, second.partition, second.host) == (2, 1, "g")
    assert (first.loss, first.bytes_sent, first.sent_fraction) == (0.5, 1000, 50 / (10 * 100))
    assert first.seconds == {"stepping": 2.5}
    (silent,) = summary(stats={7: {}}).per_worker
    assert (silent.partition, silent.host, silent.steps, silent.seconds) == (-1, "", 0, {})
    assert math.isnan(silent.tau)


def test_only_unplanned_worker_losses_are_faults() -> None:
    """Lost workers are faults, with time and reason; workers that ended as planned are not."""
    gone = [
        Departure(3, 1, "h", "silent for 3 s", 14.0),
        Departure(4, 2, "g", "in any words", 15.0, TaskEnding.RELEASED),
        Departure(5, 3, "g", "in any words", 15.5, TaskEnding.DISMISSED),
        Departure(1, 0, "h", "in any words", 18.0, TaskEnding.DONE),
    ]
    (fault,) = summary(departures=gone).faults
    assert fault == Fault("worker lost", "h", "silent for 3 s", 3.0, 3, 1)
    page = summary().table(all=True)
    assert "after 3.0 s: worker lost (node 3, partition 1) on h: silent" in page


def test_each_replaced_media_driver_is_one_fault() -> None:
    """Each media driver that was replaced by another one is reported once as a fault."""
    two = {"wire_driver 10.0.0.1:7/42": 1.0, "wire_driver 10.0.0.1:7/50": 2.0, "wire_own": 0.0}
    both = {1: STATS | two, 2: STATS | two}  # both on one executor
    replaced = [f for f in summary(stats=both).faults if f.what == "media driver replaced"]
    assert [(f.host, f.reason.split()[0]) for f in replaced] == [("g", "10.0.0.1:7/42")]
    drivers = LinkBytes({"d/1": 1.0, "d/2": 1.0, "d/3": 1.0}, 0.0)
    own = [f.reason.split()[0] for f in summary(wire=drivers).faults if f.node is None]
    assert own == ["d/1", "d/2"]


def test_page_orders_headline_result_warnings_figures() -> None:
    """The page has a headline, the result, warnings, and figures, in at most 100 columns."""
    lines = summary().table(all=True).splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    headline = "2 workers trained 2 epochs of 100 parameters in 10 s"
    assert titles[:4] == [headline, "Result", "2 warnings", "Training"]
    assert all(len(line) <= 100 for line in lines)
    assert "NOT equal" in str(summary(hashes={"1": "aa", "driver": "bb"}))


def test_notebook_page_escapes_html() -> None:
    """A notebook shows the same page, with HTML escaped."""
    shown = summary(notes=["<script>alert(1)</script>"])._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "2 workers trained 2 epochs of 100 parameters in 10 s" in shown


def test_summary_counts_only_trained_epochs() -> None:
    """A stopped fit has the epochs until then; epochs before a resume are given separately."""
    stopped = summary(stop_reason="early stopping: no better for 5 epochs")
    assert stopped.epochs == 1
    assert "2 workers trained 1 epoch of 100 parameters in" in str(stopped)
    whole = replace(summary(stop_reason=None), epochs=10, epochs_resumed=6)
    assert "2 workers trained 4 epochs of 100 parameters in" in str(whole)
    assert "after 6 epochs before it was resumed" in str(whole)


def test_early_frames_do_not_count_as_rejected() -> None:
    """Frames that arrived before their edge was open do not count as rejected."""
    traffic = Traffic(rejected=Counter({Rejection.EARLY: 2, Rejection.SEAL: 1}))
    assert summary(traffic=traffic).rejected_frames == summary().rejected_frames - 2
