"""Where "auto" puts the controller, and what is said where it can be nowhere."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from sparkstrom import SharedTrainingMaster, VoidConfiguration
from sparkstrom.base.errors import NetworkError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.controller import controller_auto
from sparkstrom.spark.controller.controller_auto import FoundOut, judged, settled
from sparkstrom.spark.controller.udp_reach import EchoPort, Reached
from sparkstrom.spark.driver.cluster import Slots

WHY = "host1 get no answer by UDP from this program at 10.77.0.1:40123; open that way"


@dataclass
class Context:
    """Of an application in client mode."""

    applicationId: str


class Finding:
    """Finds this out, and counts how often it was asked to."""

    def __init__(self, found: FoundOut | None) -> None:
        self.found, self.asked = found, 0

    def __call__(self, *given: Any) -> FoundOut | None:
        self.asked += 1
        return self.found


@pytest.fixture
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_auto, "_is_inside", lambda context: False)
    monkeypatch.setattr(controller_auto, "_found", {})


def master(workers: int = -1) -> SharedTrainingMaster:
    void = VoidConfiguration(controller_address="10.77.0.1")
    return SharedTrainingMaster(void=void, workers_per_node=workers)


@pytest.mark.usefixtures("_outside")
def test_an_application_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finding, said = Finding(FoundOut("executor", WHY)), list[str]()
    monkeypatch.setattr(controller_auto, "_found_out", finding)
    for _ in range(2):
        void = settled(master(), Context("a"), Slots(2, 2), said.append).void
        assert (void.controller, void.controller_address) == ("executor", None)
    assert finding.asked == 1
    (told,) = said
    assert WHY in told
    settled(master(), Context("b"), Slots(2, 2), said.append)
    assert finding.asked == 2


@pytest.mark.usefixtures("_outside")
@pytest.mark.parametrize(
    "other",
    [
        {"network_mask": "10.78.0.0/16"},
        {"controller_address": "10.78.0.1"},
        {"unicast_port": 50000},
        {"port_range": (50000, 50063)},
    ],
)
def test_another_way_is_asked_about_anew(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """As the error told the user of a notebook, who has followed it."""
    finding = Finding(FoundOut("executor", WHY))
    monkeypatch.setattr(controller_auto, "_found_out", finding)
    settled(SharedTrainingMaster(), Context("a"), Slots(2, 2), str)
    finding.found = FoundOut("driver")
    mended = SharedTrainingMaster(void=VoidConfiguration(**other))
    assert settled(mended, Context("a"), Slots(2, 2), str).void.controller == "driver"
    assert finding.asked == 2


ENDPOINT = Endpoint("10.77.0.1", 40123)


def test_it_moves_only_where_nobody_reaches_it() -> None:
    """A host counts as one, whichever of its tasks was answered."""
    hears, deaf = Reached("host1", heard=True), Reached("host2", heard=False)
    all_hear = [hears, Reached("host1", heard=False)]
    assert judged(all_hear, ENDPOINT) == FoundOut("driver")
    none = judged([deaf, Reached("host3", heard=False)], ENDPOINT)
    assert none.word == "executor"
    assert none.why.startswith("host2, host3 get no answer by UDP from this program at 10.77.0.1")
    some = judged([hears, deaf, deaf], ENDPOINT)
    assert some.word == "driver"
    assert some.why.startswith("host2 get no answer")


@pytest.mark.usefixtures("_outside")
def test_who_alone_does_not_reach_it_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_auto, "_found_out", Finding(FoundOut("driver", WHY)))
    said = list[str]()
    for _ in range(2):
        void = settled(master(workers=2), Context("a"), Slots(2, 2), said.append).void
        assert (void.controller, void.controller_address) == ("driver", "10.77.0.1")
    (told,) = said
    assert "the controller stays in this program (controller='auto')" in told
    assert WHY in told


@pytest.mark.usefixtures("_outside")
def test_where_nobody_has_said_the_driver_program_has_it_and_the_next_one_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finding, said = Finding(None), list[str]()
    monkeypatch.setattr(controller_auto, "_found_out", finding)
    for _ in range(2):
        void = settled(master(), Context("a"), Slots(2, 2), said.append).void
        assert (void.controller, void.controller_address) == ("driver", "10.77.0.1")
    assert (finding.asked, said) == (2, [])


@pytest.mark.usefixtures("_outside")
def test_without_a_slot_for_it_the_way_that_is_closed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the lack of a slot alone, which nobody had asked for."""
    monkeypatch.setattr(controller_auto, "_found_out", Finding(FoundOut("executor", WHY)))
    with pytest.raises(NetworkError) as caught:
        settled(master(workers=2), Context("a"), Slots(2, 2), pytest.fail)
    assert str(caught.value).startswith(WHY)
    assert "needs one slot more: 4 workers" in str(caught.value)


@pytest.mark.usefixtures("_outside")
def test_what_was_asked_for_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(None)
    monkeypatch.setattr(controller_auto, "_found_out", finding)
    given = SharedTrainingMaster(void=VoidConfiguration(controller="executor"))
    assert settled(given, Context("a"), Slots(2, 2), pytest.fail) is given
    assert finding.asked == 0


class Failing:
    """A context whose jobs Spark fails."""

    def setJobGroup(self, *given: Any, **options: Any) -> None:
        raise RuntimeError("[CANNOT_OPEN_SOCKET] Can not open socket")

    def parallelize(self, *given: Any) -> Any:
        return self

    def mapPartitions(self, run: Any) -> Any:
        return self

    def collect(self) -> list[Any]:
        return []


def test_what_keeps_it_from_being_found_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with closing(EchoPort("127.0.0.1", None)) as port, caplog.at_level("WARNING", "sparkstrom"):
        assert controller_auto._ask(port, master(), Failing(), Slots(1, 1)) is None
    assert "could not be found out: [CANNOT_OPEN_SOCKET] Can not open socket" in caplog.text
