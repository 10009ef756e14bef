"""Tests of form writers: each form's entries, alternating half steps, and the choice of a form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding import backends
from sparkstrom.encoding.encoder import (
    BitmapWriter,
    FormWriter,
    FormWriters,
    GapsWriter,
    HitScan,
    LevelsWriter,
    Workspace,
    WrittenMessage,
)
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.residual import PublicationArrays, StepSizes, create_residual

F32 = NDArray[np.float32]
Q = 0.125
ONE = StepSizes(0.5, 0.5, 0.5, 4, Q)


def flat(*values: float) -> F32:
    return np.array(values, np.float32)


class WriterSetup:
    """The residual, arrays and workspace that a writer needs."""

    def __init__(self, local: F32, levels_max: int = 1, layers: Layers | None = None) -> None:
        host, n = backends.backend(), local.size
        self.at = PublicationArrays(local, np.zeros(n, np.float32))
        self.residual = create_residual("local", n, host, layers)
        self.space = Workspace.allocate(n, host.memory, layers, levels_max=levels_max)
        self.scan = HitScan(self.residual, self.space, lambda index: f"layer {index}")

    def write(self, writer: FormWriter, stride: StepSizes = ONE) -> WrittenMessage:
        """Scan for hits and write them."""
        return writer.write(self.scan.find(self.at, stride.hit_min), self.at, stride)

    def read(self, written: WrittenMessage) -> dict[int, int]:
        """Return a message's quanta by parameter index."""
        made, layers = written.encoded, self.space.layers
        announced = (made.form, made.count, made.tau_quanta, self.at.theta.size, layers)
        indices, quanta = decode_update_untrusted(made.payload, *announced)
        return dict(zip(indices.tolist(), quanta.tolist(), strict=True))


def test_gaps_message_moves_each_hit_by_tau() -> None:
    """A gaps message moves each hit by tau."""
    desk = WriterSetup(flat(0.5, 0, -9, 0, 0, 0))
    written = desk.write(GapsWriter(desk.residual, desk.space))
    assert desk.read(written) == {0: 4, 2: -4}
    assert (written.encoded.form, written.steps, written.overflows) == (Form.GAPS, 2, 0)
    assert desk.at.theta.tolist() == [0.5, 0, -0.5, 0, 0, 0]


def test_step_count_includes_layer_multiples() -> None:
    desk = WriterSetup(flat(0.5, 0, -9, 0, 0, 0), layers=Layers((2, 6), (1, 3)))
    written = desk.write(GapsWriter(desk.residual, desk.space))
    assert desk.read(written) == {0: 4, 2: -12}
    assert written.steps == 4


def test_levels_writer_falls_back_to_gaps_without_large_hits() -> None:
    """Levels move a hit by up to 4 tau here; if no hit reaches 2 tau, the form is gaps."""
    desk = WriterSetup(flat(0.5, 0, -9, 0, 1, 0), levels_max=3)
    written = desk.write(LevelsWriter(desk.residual, desk.space, 3))
    assert desk.read(written) == {0: 4, 2: -16, 4: 8}
    assert (written.encoded.form, written.steps) == (Form.LEVELS, 7)
    plain = WriterSetup(flat(0.5, 0, 0, 0, 0, 0), levels_max=3)
    written = plain.write(LevelsWriter(plain.residual, plain.space, 3))
    assert (written.encoded.form, written.steps) == (Form.GAPS, 1)


def test_bitmap_counts_half_steps_and_alternates_their_sign() -> None:
    """A half step counts 0.5; the first bitmap sends those upwards, the second downwards."""
    desk = WriterSetup(flat(0.5, -0.5, 0.375, -0.375))
    writer = BitmapWriter(desk.residual, desk.space)
    first, second = desk.write(writer), desk.write(writer)
    assert desk.read(first) == {0: 4, 1: -4, 2: 2}
    assert first.steps == 2.5
    assert desk.read(second) == {3: -2}
    assert [made.encoded.form for made in (first, second)] == [Form.BITMAP_UP, Form.BITMAP_DOWN]


def test_sign_of_next_bitmap_survives_in_state() -> None:
    """The sign of the next bitmap's half steps is in the state."""
    desk = WriterSetup(flat(0.5, -0.5, 0.375, -0.375))
    before = FormWriters(desk.residual, desk.space, 1)
    desk.write(before.for_hits(4))
    after = FormWriters(desk.residual, desk.space, 1)
    after.bitmap.load_state(before.bitmap.state())
    assert before.bitmap.state() == after.bitmap.state() == {"half_side": -1}
    assert desk.write(after.for_hits(4)).encoded.form == Form.BITMAP_DOWN


@pytest.mark.parametrize("make", [GapsWriter, BitmapWriter])
def test_message_reports_overflow_count_and_first_parameter(make: Any) -> None:
    """A message has the number of overflows and the first parameter that overflowed."""
    desk = WriterSetup(flat(0, 2**21, 0))
    desk.at.theta[1] = 2**21 - 0.25
    desk.at.learnt[1] = 2**21 + 0.5
    written = desk.write(make(desk.residual, desk.space))
    assert (written.overflows, written.first_overflow) == (1, 1)


@pytest.mark.parametrize(
    ("levels_max", "layers", "few", "many"),
    [
        (1, None, GapsWriter, BitmapWriter),
        (2, None, LevelsWriter, LevelsWriter),
        (1, Layers((10,), (2,)), GapsWriter, GapsWriter),
    ],
)
def test_hit_count_selects_form_writer(
    levels_max: int, layers: Layers | None, few: type, many: type
) -> None:
    desk = WriterSetup(np.zeros(10, np.float32), levels_max, layers)
    forms = FormWriters(desk.residual, desk.space, levels_max)
    assert [type(forms.for_hits(hits)) for hits in (1, 4, 5, 10)] == [few, few, many, many]
    assert desk.space.codes.size == (10 if few is many else 6)  # room for all that it writes


def test_scan_names_non_finite_parameter_and_changes_nothing() -> None:
    desk = WriterSetup(flat(1, 2, np.nan, np.inf))
    with pytest.raises(TrainingError, match=r"parameter 2 \(layer 2\) became nan"):
        desk.scan.find(desk.at, 0.5)
    assert not desk.at.theta.any()


def test_subsampling_thins_ties_at_random_and_keeps_large_hits() -> None:
    """Ties are subsampled at random, differently per publication; larger residuals are all kept."""
    local = np.full(2000, 0.5, np.float32)
    local[::100] = -1.0
    desk = WriterSetup(local, levels_max=2)
    hits = desk.scan.find(desk.at, 0.5)
    assert hits == 2000
    taken = []
    for number in (1, 2):
        few = desk.scan.subsample_ties(hits, 0.1, desk.at, 0.5, number)
        codes = desk.space.codes[:few].tolist()
        assert 150 < few < 250
        assert [code for code in codes if code < 0] == [~index for index in range(0, 2000, 100)]
        taken.append(codes)
        assert desk.scan.find(desk.at, 0.5) == 2000
    assert taken[0] != taken[1]
    assert desk.scan.subsample_ties(hits, 0.9, desk.at, 0.5, 1) == 2000  # few enough: all are taken
