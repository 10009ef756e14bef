"""Time and bytes until sparkstrom and other systems reach an accuracy on hosts with slow links.

    python -m benchmarks.slow_link --rate 100mbit --json
    python -m benchmarks.slow_link --rate 10mbit,100mbit,1gbit --systems sparkstrom,diloco
    python -m benchmarks.slow_link --rate 100mbit --narrow 10mbit@20:2 --systems sparkstrom

It needs root (``benchmarks.hosts``), and creates and removes namespaces and Spark daemons. Systems:

    sparkstrom     with default options
    averaging-STEPS, diloco-STEPS   ``ParameterAveragingTrainingMaster`` with rounds of STEPS steps;
                   ``diloco-STEPS`` has DiLoCo's outer step
    dense, fp16, powersgd   torch's DistributedDataParallel over gloo; with two of torch's hooks
    diloco, sparseloco      on torch.distributed over gloo (see ``peers``)

All train the same module on the same rows (``data``), 32 rows per step and worker, with a worker of
one thread on each host. Hosts share the machine's processors, also with Spark's driver, media
drivers and JVMs; on hosts with processors of their own, figures would differ. Learning rates are
chosen from one small grid (``choosing``), on rows that are not used for results.

A run ends after ``--epochs`` or ``--limit-s`` seconds of training. Training begins when all workers
have the initial parameters and the first step begins. ``startup_s`` is the time until then, from
the call of ``fit`` with Spark's executors running, or from the start of the peers' processes. Both
include starting Python and importing torch. Every second, the parameters (of the driver's replica,
of rank 0, or of the newest outer step) are copied, for which rank 0 or the master's thread stops;
the copies are evaluated at the end. One object per link, system and seed:

    seconds_to     of training until the accuracy was at least ``wanted`` in three evaluations in a
                   row (the first of them counts); null: never in this run
    projected_s, projected_steps   only if ``seconds_to`` is null, for systems of ``--project``
                   (dense), whose steps are the same on every link: a projection, which multiplies
                   the steps that a run without limited links needs (``projected_steps``) by this
                   link's ``ms_per_step``
    startup_s      see above; startup_next_s: of sparkstrom's next ``fit`` in the same application,
                   whose executors have imported everything
    accuracy, accuracy_best   on rows that are not trained on: at the end, and the best
    seconds        of training in all
    ended          "epochs", "limit" or the error
    steps, steps_wanted, steps_to   of a worker: made, in all epochs, until ``wanted`` was reached
    ms_per_step    seconds / steps: time of a worker's step, with waiting
    cpu_ms_per_step   processor time of all processes on all hosts while training, per step of any
                   worker
    bytes          sent by all hosts' interfaces, with headers, from the call to the end of
                   training; bytes_training: without start-up; bytes_to: of training until
                   seconds_to
    bytes_driver   of these, from host 0: Spark's driver, or rank 0, and one worker;
                   bytes_driver_training; bytes_driver_received
    curve          [seconds, accuracy, steps of a worker], at most 60 points
    summary        sparkstrom's own figures of the fit
    rate, narrowed, system, seed, hosts, n_params, optimizer, wanted   the options of this run
    learning_rate, learning_rate_scores   the chosen one, and the mean accuracy of each in the grid
    log            only if training did not begin: the end of the program's output
"""
