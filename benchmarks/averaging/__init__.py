"""Averaging and gradient sharing: accuracy over time and bytes, on slow and fast links.

    python -m benchmarks.averaging --json
    python -m benchmarks.averaging --links 100mbit,10gbit --systems averaging-5,diloco-20,ours
    python -m benchmarks.averaging --large 100000000 --json     # a real fit of so many parameters

All systems train the same rows, module, optimizer and learning rate in one process, 32 rows a step,
as in ``benchmarks.convergence``:

    averaging-H   rounds of H steps by ``sparkstrom.rounds.averaging``, with which
                  ``ParameterAveragingTrainingMaster`` averages results of executors
    diloco-H      the same with ``outer=Nesterov(0.7, 0.9)`` and ``save_updater="own"``
    ours          gradient sharing in virtual time

Accuracy is that of this training. Time is computed, not measured: it is that of a module of
``--params`` parameters whose step takes ``--step`` seconds, on hosts with links of one rate; a
Spark job takes another ``--job`` seconds. Bytes are those of the small module, scaled to
``--params`` (see ``clock``). So results do not depend on how busy this machine is, and do not prove
the model of time; ``benchmarks.slow_link`` measures on such links. One object per link and system:

    system, workers, link, task, optimizer, seed   the options of this run
    accuracy         on ``test`` at the end
    seconds          of the whole training; steps_s: of its steps alone
    seconds_to       until the accuracy on ``test`` at an epoch's end is ``--wanted`` or more and
                     stays there; null: never
    gigabytes        sent over all links
    gigabytes_to     the same until ``seconds_to``
    steps_per_round  H; 0 without rounds

``--large`` runs one fit on Spark's executors instead, averaged after each step. It prints the
seconds of each round, the bytes that workers sent, and the peaks of memory in MiB: of the driver
program, of its JVM, and of the largest executor and Python worker.
"""
