"""Faults: what a network and its machines may do to us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Rates per message, and how many of each event happen in a run."""

    loss: float = 0.05  # of what is said directly and of control that is repeated; data is not lost
    repeat: float = 0.03
    delay_ms_max: float = 40.0
    late: float = 0.02  # share of messages that come up to half a second late: reordering
    bandwidth: float = 0.0  # bytes per second that one host can send; 0: no bound
    rate: float = 0.0  # bytes per second of each host's interface, each way; 0: no links at all
    narrow: int = 0  # hosts whose interface is narrower than that from the beginning
    narrows: int = 0  # times that a host's interface gets narrower in mid-run
    slow_pollers: int = 0  # workers that look at their streams seldom
    step_s_max: float = 0.03  # a slow trainer's steps take up to so long
    crashes: int = 2  # a worker process is gone; Spark starts another after a while
    executor_crashes: int = 0  # all workers of one executor are gone at once
    doubles: int = 0  # Spark starts another attempt although the first one lives
    cuts: int = 2  # a worker is out of reach for up to two leases, both ways or one way: half a
    # lease breaks its streams, less only delays what goes over them
    pauses: int = 1  # a worker's process stands still for up to two leases
    master_pauses: int = 0  # the driver program stands still for up to two leases
    splits: int = 0  # half of the workers cannot speak with the others for up to two leases
    isolations: int = 0  # nobody can speak with the driver program for up to four leases
    slow: int = 0  # workers on machines that are ten times slower
    drift: float = 0.0  # share by which the workers' clocks go fast or slow, from other zeros
    leaps: int = 0  # a worker's clock goes forward by up to an eighth of a lease
    breaks: int = 0  # one stream of an edge is dead for good, the others of that edge live
    exiles: int = 0  # a worker is out of reach for ever
    master_lost: int = 0  # the driver program is gone for ever
    controller_dies: int = 0  # the master, alone of the driver program; the fit goes on from a copy
    edge_deaths: int = 2  # a media driver dies: all that was under way on its edges is lost
    driver_deaths: int = 0  # the same in the middle of what a machine wants done, some in a row
    stop: float = 0.0  # chance that somebody asks to end the fit early
    failure: float = 0.0  # chance that training raises in some worker
    restart_s_max: float = 4.0  # until Spark starts a lost task again
    quiet_after_s: float = 12.0  # so long after training began messages stop getting lost


NO_FAULTS = Faults(
    loss=0, repeat=0, delay_ms_max=2, late=0, crashes=0, cuts=0, pauses=0, edge_deaths=0
)
