"""Tests of controller="auto": where the controller is placed, and what is reported."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from sparkstrom import SharedTrainingMaster, VoidConfiguration
from sparkstrom.base.errors import NetworkError
from sparkstrom.base.identity import Endpoint
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.spark.controller import reachability as controller_auto
from sparkstrom.spark.controller.reachability import (
    ProbeResult,
    ReachabilityResult,
    UdpEchoServer,
    choose_controller_place,
    resolve_controller,
)

WHY = "host1 get no answer by UDP from this program at 10.77.0.1:40123; open that way"


@dataclass
class Context:
    """A fake SparkContext in client mode."""

    applicationId: str


class FakeReachabilityTest:
    """A fake reachability test that returns this result and counts its calls."""

    def __init__(self, found: ReachabilityResult | None) -> None:
        self.found, self.asked = found, 0

    def __call__(self, *given: Any) -> ReachabilityResult | None:
        self.asked += 1
        return self.found


@pytest.fixture
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the driver program outside the cluster, with an empty cache of results."""
    monkeypatch.setattr(controller_auto, "_is_driver_in_cluster", lambda context: False)
    monkeypatch.setattr(controller_auto, "_results", {})


def master(workers: int = -1) -> SharedTrainingMaster:
    void = VoidConfiguration(controller_address="10.77.0.1")
    return SharedTrainingMaster(void=void, workers_per_node=workers)


@pytest.mark.usefixtures("_outside")
def test_reachability_is_tested_once_per_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reachability is tested, and reported, once per application."""
    finding, said = FakeReachabilityTest(ReachabilityResult("executor", WHY)), list[str]()
    monkeypatch.setattr(controller_auto, "_test_reachability", finding)
    for _ in range(2):
        void = resolve_controller(master(), Context("a"), TaskSlots(2, 2), said.append).void
        assert (void.controller, void.controller_address) == ("executor", None)
    assert finding.asked == 1
    (told,) = said
    assert WHY in told
    resolve_controller(master(), Context("b"), TaskSlots(2, 2), said.append)
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
def test_changed_network_options_repeat_reachability_test(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """With other network options, as the error recommends them, reachability is tested again."""
    finding = FakeReachabilityTest(ReachabilityResult("executor", WHY))
    monkeypatch.setattr(controller_auto, "_test_reachability", finding)
    resolve_controller(SharedTrainingMaster(), Context("a"), TaskSlots(2, 2), str)
    finding.found = ReachabilityResult("driver")
    mended = SharedTrainingMaster(void=VoidConfiguration(**other))
    assert (
        resolve_controller(mended, Context("a"), TaskSlots(2, 2), str).void.controller == "driver"
    )
    assert finding.asked == 2


ENDPOINT = Endpoint("10.77.0.1", 40123)


def test_controller_moves_only_if_no_host_gets_answer() -> None:
    """The controller moves only if no host gets an answer; one answered task suffices per host."""
    hears, deaf = ProbeResult("host1", heard=True), ProbeResult("host2", heard=False)
    all_hear = [hears, ProbeResult("host1", heard=False)]
    assert choose_controller_place(all_hear, ENDPOINT) == ReachabilityResult("driver")
    none = choose_controller_place([deaf, ProbeResult("host3", heard=False)], ENDPOINT)
    assert none.place == "executor"
    assert none.why.startswith("host2, host3 get no answer by UDP from this program at 10.77.0.1")
    some = choose_controller_place([hears, deaf, deaf], ENDPOINT)
    assert some.place == "driver"
    assert some.why.startswith("host2 get no answer")


@pytest.mark.usefixtures("_outside")
def test_hosts_without_answer_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only some hosts get no answer, the controller stays, and one message names them."""
    monkeypatch.setattr(
        controller_auto,
        "_test_reachability",
        FakeReachabilityTest(ReachabilityResult("driver", WHY)),
    )
    said = list[str]()
    for _ in range(2):
        void = resolve_controller(
            master(workers=2), Context("a"), TaskSlots(2, 2), said.append
        ).void
        assert (void.controller, void.controller_address) == ("driver", "10.77.0.1")
    (told,) = said
    assert "the controller stays in this program (controller='auto')" in told
    assert WHY in told


@pytest.mark.usefixtures("_outside")
def test_unknown_reachability_keeps_controller_and_is_tested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a result, the controller stays, and the next fit tests reachability again."""
    finding, said = FakeReachabilityTest(None), list[str]()
    monkeypatch.setattr(controller_auto, "_test_reachability", finding)
    for _ in range(2):
        void = resolve_controller(master(), Context("a"), TaskSlots(2, 2), said.append).void
        assert (void.controller, void.controller_address) == ("driver", "10.77.0.1")
    assert (finding.asked, said) == (2, [])


@pytest.mark.usefixtures("_outside")
def test_missing_slot_error_names_blocked_udp_path_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the controller must move but has no slot, the error names the blocked UDP path first."""
    monkeypatch.setattr(
        controller_auto,
        "_test_reachability",
        FakeReachabilityTest(ReachabilityResult("executor", WHY)),
    )
    with pytest.raises(NetworkError) as caught:
        resolve_controller(master(workers=2), Context("a"), TaskSlots(2, 2), pytest.fail)
    assert str(caught.value).startswith(WHY)
    assert "needs one slot more: 4 workers" in str(caught.value)


@pytest.mark.usefixtures("_outside")
def test_chosen_controller_place_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that the user chose is not tested."""
    finding = FakeReachabilityTest(None)
    monkeypatch.setattr(controller_auto, "_test_reachability", finding)
    given = SharedTrainingMaster(void=VoidConfiguration(controller="executor"))
    assert resolve_controller(given, Context("a"), TaskSlots(2, 2), pytest.fail) is given
    assert finding.asked == 0


class FailingContext:
    """A fake SparkContext whose jobs fail."""

    def setJobGroup(self, *given: Any, **options: Any) -> None:
        raise RuntimeError("[CANNOT_OPEN_SOCKET] Can not open socket")

    def parallelize(self, *given: Any) -> Any:
        return self

    def mapPartitions(self, run: Any) -> Any:
        return self

    def collect(self) -> list[Any]:
        return []


def test_failed_probe_job_logs_reason(caplog: pytest.LogCaptureFixture) -> None:
    """If the test's job fails, there is no result, and a warning has the reason."""
    with (
        closing(UdpEchoServer("127.0.0.1", None)) as port,
        caplog.at_level("WARNING", "sparkstrom"),
    ):
        assert (
            controller_auto._run_probe_job(port, master(), FailingContext(), TaskSlots(1, 1))
            is None
        )
    said = "could not find out whether executors reach this program by UDP: [CANNOT_OPEN_SOCKET]"
    assert f"{said} Can not open socket" in caplog.text
