"""Averaging or sharing: accuracy against time and bytes, on slow and on fast links.

    python -m benchmarks.averaging --json
    python -m benchmarks.averaging --links 100mbit,10gbit --systems averaging-5,diloco-20,ours
    python -m benchmarks.averaging --large 100000000 --json     # a real fit of so many parameters

Accuracy is of real training in one process, as in ``benchmarks.convergence``: the same rows,
module, optimizer and learning rate, 32 rows a step; ``averaging-H`` and ``diloco-H`` are rounds of
H steps by ``sparkstrom.rounds.averaging``, which is what ``ParameterAveragingTrainingMaster`` does
on executors (``diloco-H`` with ``outer=Nesterov(0.7, 0.9)``, ``save_updater="own"``), ``ours`` are
replicas that share thresholded updates, in virtual time. Time is reckoned, not measured: that of a
module of ``--params`` parameters whose step takes ``--step``, on hosts with links of one rate, with
the bytes that the small module really sent, scaled as described in ``clock``. A Spark job takes
``--job`` besides. So nothing depends on how busy this machine is, and nothing proves the model of
time; ``benchmarks.slow_link`` measures sharing on such links. One object per link and system:

    system, workers, link, task, optimizer, seed   what was asked for
    accuracy         on ``test`` at the end
    seconds          of the whole training; steps_s: of its steps alone
    seconds_to       until the accuracy on ``test`` at an epoch's end was ``--wanted`` or more and
                     stayed there; null: never
    gigabytes        that all links carried
    gigabytes_to     the same until then
    steps_per_round  H; 0: none

With ``--large`` one fit on Spark's executors, averaged after each step: seconds of each round,
bytes that workers sent, and the peak of memory (MiB) of the driver program, its JVM, and the
largest executor and Python worker.
"""
