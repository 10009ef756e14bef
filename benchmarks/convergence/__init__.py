"""Training by k workers with hyperparameters that were chosen for one process.

    python -m benchmarks.convergence --tasks digits,conv --workers 4,8,16 --json
    python -m benchmarks.convergence --tasks conv --optimizers momentum --systems ours \\
        --set horizon=worker --set horizon=fit,latency=2
    python -m benchmarks.convergence --tasks digits --workers 4 --executors 4 --json
    python -m benchmarks.convergence --choose --tasks regression

All systems train the same rows (``tasks``) with the same module, optimizer, learning rate,
minibatches (32 rows per worker) and number of epochs. Only ``ddp-best`` has a learning rate of its
own: the best one on ``validate`` of 1, 2, 4, 8 and 16 times the others' rate. ``ours`` is a fit
that ``sparkstrom.rehearsal`` simulates, ``executors`` the same fit by ``SparkNetwork.fit`` on
Spark's executors. ``baselines`` describes the others, of which DiLoCo and SparseLoCo also take
other numbers (``diloco-STEPS``, ``sparseloco-PERCENT-STEPS``). One object per run:

    task, optimizer, workers, system, settings, seed, rate, options   the options of this run
    value            of the task's metric on ``test``: accuracy, or loss
    minibatches      of all workers together
    gap              how much worse ``value`` is than that of one process with the same seed
                     (negative: better)
    gap_error        standard error of the gap over the test rows, which are paired
    behind_ddp, behind_ddp_error     the same relative to DDP with the same seed, if DDP ran
    loss, loss_gap   the loss and its gap, which is more precise if few rows are wrong
    validate         the metric's value on ``validate``
    bytes_factor     how many times fewer bytes are sent than with a float32 gradient per step; for
                     executors, an update has headers and seals (some 115 bytes), and BatchNorm's
                     statistics count
    figures          of ours: summed_workers at the end; staleness_minibatches, of other workers;
                     staleness_rounds, the same divided by k; time, virtual, relative to a fit in
                     which no worker waits; sent_fraction; mass_clipped, relative to what was sent;
                     residual_norm; publications
    seconds          that the run took; 0 for DDP if it had run already, for comparison
"""
