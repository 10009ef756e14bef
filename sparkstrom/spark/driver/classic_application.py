"""Classic application: Spark with a SparkContext in this process; see ``application``."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from sparkstrom.observe.progress_choice import is_notebook, reads_descriptors
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.averaging.rdd_engine import RddEngine
from sparkstrom.spark.averaging.round_job import AveragingJob
from sparkstrom.spark.averaging.rounds import Rounds
from sparkstrom.spark.averaging.rounds_control import RoundsControl
from sparkstrom.spark.controller.control_door import door_address
from sparkstrom.spark.controller.control_words import LineOrder
from sparkstrom.spark.controller.controller_auto import settled
from sparkstrom.spark.controller.controller_job import ControllerPlacing
from sparkstrom.spark.data import partitioning as spreading
from sparkstrom.spark.data.columns import Chosen
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.averaging_master import TrainingMaster, moves
from sparkstrom.spark.driver.cluster import Slots, driver_host, is_stopped, live_conf, slots_of
from sparkstrom.spark.driver.container_memory import ContainerMemory, Need
from sparkstrom.spark.driver.decommission_watch import DecommissionWatch
from sparkstrom.spark.driver.evaluation import Evaluation, Wanted, evaluate_source
from sparkstrom.spark.driver.first_rows import first_blocks
from sparkstrom.spark.driver.fit_listeners import FitListener
from sparkstrom.spark.driver.initial_parameters import Handle, StateHandle, own_states, travelling
from sparkstrom.spark.driver.interrupts import plain_interrupts
from sparkstrom.spark.driver.memory_parts import demand_of
from sparkstrom.spark.driver.memory_watch import MemoryWatch
from sparkstrom.spark.driver.pickling import keep_tasks_out_of_logs
from sparkstrom.spark.driver.registering import await_slots
from sparkstrom.spark.driver.spark_job import SparkJob
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.entry import Unopened, enter
from sparkstrom.spark.executor.job import TrainingJob
from sparkstrom.spark.executor.tasks import forget_kept

Say = Callable[[str], None]


class ClassicApplication:
    """Asks a SparkContext."""

    def __init__(self, context: Any) -> None:
        self._context = context
        keep_tasks_out_of_logs()

    @property
    def name(self) -> str:
        return str(self._context.applicationId)

    @property
    def live_conf(self) -> Any:
        return live_conf(self._context)

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self._context)

    @property
    def host(self) -> str:
        return driver_host(self._context)

    def conf(self) -> Mapping[str, str]:
        return dict(self._context.getConf().getAll())

    @property
    def has_workers_output(self) -> bool:
        """True in local mode, where tasks write to the standard error of this program's JVM.

        A notebook shows that only if its kernel reads the file descriptor.
        """
        if not re.fullmatch(r"local(\[.*\])?", self._context.master):
            return False
        launched = getattr(self._context._gateway, "proc", None) is not None
        return not is_notebook() or (launched and reads_descriptors(sys.stderr))

    def check(self, master: TrainingMaster) -> None:
        """Everything works."""

    def check_data(self, data: Any) -> None:
        spreading.check_data(data)

    def need_rdds(self, what: str, instead: str) -> None:
        """They are there."""

    def slots(self, seconds: float, say: Say) -> Slots:
        return await_slots(self._context, seconds, say)

    def settled(self, master: SharedTrainingMaster, slots: Slots, say: Say) -> SharedTrainingMaster:
        return settled(master, self._context, slots, say)

    def local_property(self, key: str) -> str | None:
        found: str | None = self._context.getLocalProperty(key)
        return found

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        from pyspark import InheritableThread  # closes its connection to the JVM

        return InheritableThread(target=run, name=name)

    def interrupts(self) -> AbstractContextManager[None]:
        return plain_interrupts(self._context)

    def spread(self, data: Any, chosen: Chosen, workers: int, master: TrainingMaster) -> Spread:
        seed, move = master.rng_seed, moves(master.repartition, data, workers)
        source = spreading.source_of(data, chosen)
        spread = spreading.spread_out(source, workers, seed, move=move)
        return spread._replace(first=partial(first_blocks, self._context, source))

    def travelling(
        self, theta: Theta, workers: int, state: bytes
    ) -> AbstractContextManager[Handle]:
        return travelling(self._context, theta, workers, state)

    def own_states(
        self, states: Mapping[int, bytes]
    ) -> AbstractContextManager[dict[int, StateHandle]]:
        return own_states(self._context, states)

    def training(self, job: TrainingJob, spread: Spread, need: Need) -> SparkJob:
        run = partial(enter, Unopened(job, job.way), spread.blocks)
        runner = spread.rdd.mapPartitionsWithIndex(run).collect
        memory = ContainerMemory(self.live_conf, need)
        return SparkJob(self._context, f"sparkstrom-{job.spec.job:016x}", runner, memory)

    def rounds(self, job: AveragingJob, spread: Spread, control: RoundsControl) -> SparkJob:
        engine = RddEngine(self._context, job, spread, lambda: control.given_up)
        group = f"sparkstrom-{job.spec.job:016x}"
        need = Need.of(self.live_conf, spread.workers, demand_of(job.model), job.master)
        memory = ContainerMemory(self.live_conf, need)
        run = Rounds(engine, job, control).run
        return SparkJob(self._context, group, run, memory, "sparkstrom averaging")

    def watches(self, job: SparkJob, warn: Say) -> list[FitListener]:
        return [MemoryWatch(job, warn), DecommissionWatch(job, warn)]

    def placing(
        self, training: TrainingJob, kept: CheckpointFiles, line: LineOrder, say: Say
    ) -> ControllerPlacing:
        return ControllerPlacing(self._context, training, kept, line, say)

    def door_address(self) -> tuple[str, str]:
        return door_address(self._context)

    def ship(self, value: Any) -> Any:
        return self._context.broadcast(value)

    def evaluate(self, shipped: Any, wanted: Wanted, data: Any, chosen: Chosen) -> Evaluation:
        return evaluate_source(shipped, wanted, spreading.source_of(data, chosen))

    def forget(self, network: str) -> None:
        slots = slots_of(self._context).total
        forget = partial(forget_kept, network)
        self._context.parallelize(range(slots), slots).mapPartitions(forget).count()
