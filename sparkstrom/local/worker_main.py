"""Worker main: the process of a worker; it trains on order, fit after fit, until nobody orders.

``python -m sparkstrom.local.worker_main SOCKET MEMORY`` is started by ``worker_pool`` only. Orders
and answers go over one socket that nobody else has; where that closes the process ends at once.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from sparkstrom.base.errors import PeerError, reason_of
from sparkstrom.local.life_signs import BEAT_S, Pulse
from sparkstrom.local.orders import WorkerAnswer, WorkerOrder
from sparkstrom.local.step_limit import limit, stack_of_main_thread
from sparkstrom.protocol.common.endings import Vain

ORPHANED, STUCK = 3, 4  # exit status where the calling process is gone; where a step has no end


class AnswerLine:
    """To the calling process: of the thread that has the orders, or of the one that watches it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, answer: WorkerAnswer) -> None:
        """An order is carried out, or has failed."""
        limit.lift()
        with self._lock:
            self._connection.send(answer)

    def end_if_stuck(self) -> None:
        """Where a step takes longer than it may, say so instead, and end the process."""
        if not limit.look():
            return
        with self._lock:
            seconds = limit.seconds
            if limit.is_same:
                text = Vain.STEP.value.format(silent=seconds)
                trace = stack_of_main_thread()
                self._connection.send(WorkerAnswer("", text, trace, kind="TrainingError"))
                os._exit(STUCK)


def main(arguments: list[str]) -> int:
    """Serve until the other end closes."""
    descriptor, memory = map(int, arguments)
    with Connection(descriptor) as orders:
        answers, pulse = AnswerLine(orders), Pulse(memory)
        watching = threading.Thread(target=_live, args=(descriptor, pulse, answers), daemon=True)
        watching.start()
        while True:
            try:
                order: WorkerOrder = pickle.loads(orders.recv_bytes())
            except EOFError:
                return 0
            answers.send(answer_to(order))


def answer_to(order: WorkerOrder) -> WorkerAnswer:
    """Do it; what it raises is an answer, too."""
    try:
        return WorkerAnswer(order.carry_out())
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        is_superseded, kind = isinstance(error, PeerError), type(error).__name__
        return WorkerAnswer("", reason_of(error), trace, is_superseded, kind)


def _live(descriptor: int, pulse: Pulse, answers: AnswerLine) -> None:
    """Until nobody orders: a trainer in the middle of a step reads no order."""
    looked = select.poll()
    looked.register(descriptor, 0)  # a closed end is told without being asked for
    pulse.beat()
    while not looked.poll(BEAT_S * 1000):
        pulse.beat()
        answers.end_if_stuck()
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
