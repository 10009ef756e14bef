"""Four hosts behind slow links: sparkstrom, and what people use instead, to the same accuracy.

    python -m benchmarks.slow_link --rate 100mbit --json
    python -m benchmarks.slow_link --rate 10mbit,100mbit,1gbit --systems sparkstrom,diloco
    python -m benchmarks.slow_link --rate 100mbit --narrow 10mbit@20:2 --systems sparkstrom

Needs root (``benchmarks.hosts``: it builds and removes namespaces and Spark daemons of its own).
Systems: sparkstrom with its defaults; its ``ParameterAveragingTrainingMaster``, ``averaging-STEPS``
a round and, with DiLoCo's outer step, ``diloco-STEPS``; and, on torch.distributed with gloo,
``dense`` (DistributedDataParallel), ``fp16`` and ``powersgd`` (torch's hooks), ``diloco``,
``sparseloco`` (see ``peers``). All train the same module on the same rows (``data``), 32 rows a
step and worker, one worker on each host, one thread a worker. Hosts share the machine's processors,
so a system has what the machine has: a driver, media drivers and JVMs take theirs from the same
share, and no figure is that of a machine with processors of its own for each host. Learning rates
come from one small grid (``choosing``), on rows that the result does not use.

A run ends after ``--epochs`` or ``--limit-s`` of training. Training begins when all workers hold
the initial parameters and the first step begins; ``startup_s`` is the time until then, from the
call of ``fit`` with Spark's executors up, or from the start of the peers' processes: either has to
start Python and to import torch. The parameters (of the driver's replica; of rank 0; of the newest
outer step) are put aside every second, which stops rank 0, or the master's thread, for a copy, and
are evaluated after the end. One object per link, system and seed:

    seconds_to     of training until ``wanted`` was reached and held for three evaluations; null:
                   never in this run
    projected_s    only where late, and a projection, no measurement: steps that the system takes
                   without limits of links, ``projected_steps``, at this link's ms_per_step; for
                   ``--project`` (dense), whose steps are the same on every link
    startup_s      see above; startup_next_s: sparkstrom's, of another ``fit`` in the same
                   application, whose executors have imported all by then
    accuracy, accuracy_best   on rows that nobody trains on; at the end, and the best
    seconds        of training in all
    ended          "epochs", "limit" or the error
    steps, steps_wanted, steps_to   of a worker: taken, in all epochs, until ``wanted`` was reached
    ms_per_step    seconds / steps: what a worker's step takes, waiting included
    cpu_ms_per_step   processor time of all processes on all hosts while training, by steps of
                   all workers
    bytes          that left all hosts' interfaces, headers included, from the call to the end of
                   training; bytes_training: without start-up; bytes_to: of training until
                   seconds_to
    bytes_driver   of these, from host 0: Spark's driver, or rank 0, and one worker;
                   bytes_driver_training; bytes_driver_received
    curve          [seconds, accuracy, steps of a worker], at most 60 points
    summary        sparkstrom's own figures of the fit
    rate, narrowed, system, seed, hosts, n_params, optimizer, wanted   what was asked for
    learning_rate, learning_rate_scores   the one chosen, and the mean accuracy of each of the grid
    log            only where nothing began: the end of what the program said
"""
