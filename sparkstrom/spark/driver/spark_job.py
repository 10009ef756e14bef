"""Spark job: the one of a fit, in a thread of its own, and what Spark says of its tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.container_memory import ContainerMemory

RUNNING = "RUNNING"  # a task, in Spark's words
TASKS_LOOKED_AT = 1000  # for the errors of those that failed


@dataclass(frozen=True, slots=True)
class RunningTask:
    """One attempt of a task."""

    attempt: int  # Spark's taskAttemptId
    partition: int
    executor: str


@dataclass(slots=True)
class SparkJob:
    """A Spark job of a fit, in a thread of its own."""

    context: Any
    group: str
    runner: Callable[[], list[Any]]
    memory: ContainerMemory | None = None  # of its executors, where that is to be explained
    words: str = "sparkstrom training"  # in Spark's UI
    reports: list[Any] = field(default_factory=list)  # of the tasks, once all have returned
    error: Exception | None = None
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Submit."""
        from pyspark import InheritableThread

        self.thread = InheritableThread(target=self._run, name=f"{self.group}-job", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.context.setJobGroup(self.group, self.words, interruptOnCancel=True)
            self.reports = self.runner()
        except Exception as error:  # handed to the main thread, which decides what it means
            self.error = error

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def cancel(self) -> None:
        """End whatever of it still runs."""
        self.context.cancelJobGroup(self.group)

    def wait(self, seconds: float) -> bool:
        """Until it has returned; at most so long."""
        assert self.thread is not None
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def tasks(self) -> tuple[int | None, int]:
        """Tasks that have a slot now (None: nobody knows), and tasks that have failed so far."""
        known = self._stages()
        return sum(s.numActiveTasks for s in known), sum(s.numFailedTasks for s in known)

    def task_errors(self) -> list[str]:
        """What failed tasks raised, each once, in one line; nothing where Spark does not say."""
        errors = (task.errorMessage() for task in self._tasks())
        return list(dict.fromkeys(cause_of(each.get()) for each in errors if each.isDefined()))

    def executors(self) -> set[str]:
        """Ids of those that run tasks of it now."""
        return {str(task.executorId()) for task in self._tasks() if task.status() == RUNNING}

    def running_tasks(self) -> list[RunningTask]:
        """Its tasks that have a slot now."""
        return [
            RunningTask(int(task.taskId()), int(task.index()), str(task.executorId()))
            for task in self._tasks()
            if task.status() == RUNNING
        ]

    def _tasks(self) -> Iterator[Any]:
        """As Spark's status store has them."""
        store = self.context._jsc.sc().statusStore()
        for stage in self._stages():
            tasks = store.taskList(stage.stageId, stage.currentAttemptId, TASKS_LOOKED_AT)
            yield from (tasks.apply(i) for i in range(tasks.size()))

    def newest(self) -> list[tuple[int, int, int]]:
        """By stage: the attempt at it that is under way, and how many tasks of that have failed."""
        return [(s.stageId, s.currentAttemptId, s.numFailedTasks) for s in self._stages()]

    def killed_for_memory(self) -> list[str]:
        """What to set, for each container that was; Spark names them in its tasks' errors."""
        if self.memory is None:
            return []
        store = self.context._jsc.sc().statusStore()
        java, known = self.context._jvm.java.util.List, self.context._jvm.org.apache.spark.status
        failed = java.of(known.api.v1.TaskStatus.FAILED)
        found: dict[str, None] = {}
        for stage, newest, _ in self.newest():
            for attempt in range(newest + 1):
                order = known.api.v1.TaskSorting.ID
                tasks = store.taskList(stage, attempt, 0, TASKS_LOOKED_AT, order, failed)
                for i in range(tasks.size()):
                    error = tasks.apply(i).errorMessage()
                    found[self.memory.explain(error.get() if error.isDefined() else "")] = None
        return [text for text in found if text]

    def _stages(self) -> list[Any]:
        tracker = self.context.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self.group))
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        return [stage for stage in stages if stage is not None]
