"""The main program of a worker process: run tasks until the calling process closes the socket.

Only ``worker_pool`` starts this program, as ``python -m sparkstrom.local.worker_main SOCKET
MEMORY``. The arguments are file descriptors: one end of a socket pair, and the memory of the
heartbeat counter. The process exits as soon as the calling process's end of the socket closes, even
in the middle of a training step.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from sparkstrom.base.errors import PeerError, format_reason
from sparkstrom.local.worker_pool import (
    HEARTBEAT_S,
    HeartbeatSender,
    WorkerAnswer,
    WorkerTask,
    format_main_thread_stack,
    step_limit,
)
from sparkstrom.protocol.common.events_and_effects import TimeoutReason

EXIT_ORPHANED, EXIT_STUCK = 3, 4  # exit status: the caller is gone; a step exceeded its time limit


class AnswerChannel:
    """Sends answers to the calling process. Used by the training and the monitoring thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, answer: WorkerAnswer) -> None:
        """Send a task's answer; the time limit on its last step no longer applies."""
        step_limit.end_step()
        with self._lock:
            self._connection.send(answer)

    def exit_if_step_timed_out(self) -> None:
        """If a training step exceeds its time limit, send an answer that says so, and exit.

        Exiting (status EXIT_STUCK) is the only way to end a step that hangs.
        """
        if not step_limit.check_overdue():
            return
        with self._lock:
            seconds = step_limit.seconds
            if step_limit.is_still_running:
                text = TimeoutReason.STEP.value.format(silent=seconds)
                trace = format_main_thread_stack()
                self._connection.send(WorkerAnswer("", text, trace, kind="TrainingError"))
                os._exit(EXIT_STUCK)


def main(arguments: list[str]) -> int:
    """Run tasks until the calling process closes the socket; return exit status 0.

    ``arguments`` are the file descriptors of the socket and of the heartbeat memory.
    """
    descriptor, memory = map(int, arguments)
    with Connection(descriptor) as connection:
        answers, heartbeats = AnswerChannel(connection), HeartbeatSender(memory)
        arguments_of_monitor = (descriptor, heartbeats, answers)
        threading.Thread(target=_monitor, args=arguments_of_monitor, daemon=True).start()
        while True:
            try:
                task: WorkerTask = pickle.loads(connection.recv_bytes())
            except EOFError:
                return 0
            answers.send(run_task(task))


def run_task(task: WorkerTask) -> WorkerAnswer:
    """Run a task; return its report, or a description of the exception that it raised.

    Only KeyboardInterrupt is raised again.
    """
    try:
        return WorkerAnswer(task.run())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's model may even raise SystemExit
        trace = "".join(traceback.format_exception(error))
        is_superseded, kind = isinstance(error, PeerError), type(error).__name__
        return WorkerAnswer("", format_reason(error), trace, is_superseded, kind)


def _monitor(descriptor: int, heartbeats: HeartbeatSender, answers: AnswerChannel) -> None:
    """Send heartbeats and check for overdue steps; exit when the calling process is gone.

    This runs in a separate thread, because the main thread does not read the socket during a step.
    """
    poller = select.poll()
    poller.register(descriptor, 0)  # poll() reports a closed socket even for an empty event mask
    heartbeats.beat()
    while not poller.poll(HEARTBEAT_S * 1000):  # milliseconds
        heartbeats.beat()
        answers.exit_if_step_timed_out()
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
