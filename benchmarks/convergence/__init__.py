"""Do hyperparameters carry over? What was tuned on one process, trained by k workers.

    python -m benchmarks.convergence --tasks digits,conv --workers 4,8,16 --json
    python -m benchmarks.convergence --tasks conv --optimizers momentum --systems ours \\
        --set horizon=worker --set horizon=fit,latency=2
    python -m benchmarks.convergence --tasks digits --workers 4 --executors 4 --json
    python -m benchmarks.convergence --choose --tasks regression

All systems train the same rows (``tasks``) with the same module, optimizer, learning rate,
minibatch of 32 rows a worker and number of epochs; only ``ddp-best`` has a learning rate of its
own, the best on ``validate`` of 1, 2, 4, ... times the one process's. ``ours`` is a fit that
``sparkstrom.rehearsal`` simulates, ``executors`` the same by ``SparkNetwork.fit`` on
Spark's executors, and the others as ``baselines`` describes, DiLoCo and SparseLoCo also with other
numbers (``diloco-STEPS``, ``sparseloco-PERCENT-STEPS``). One object per run:

    task, optimizer, workers, system, settings, seed, rate, options   what was asked for
    value            of the task's metric on ``test``: accuracy, or loss
    minibatches      of all workers together
    gap              to one process with the same seed: how much worse (negative: better)
    gap_error        the gap's standard error, of the test rows alone; paired, row by row
    behind_ddp, behind_ddp_error     the same against DDP with the same seed, if that ran, too
    loss, loss_gap   the same of the loss, which is more precise if few rows are wrong
    validate         the metric's value on ``validate``
    bytes_factor     times fewer bytes than float32 gradients at each step; of executors with the
                     updates' headers and seals, some 115 bytes each, and BatchNorm's statistics
    figures          ours: summed_workers at the end; staleness_minibatches of other workers;
                     staleness_rounds, the same for each worker; time, virtual, of what it takes
                     if no worker ever waits; sent_fraction; mass_clipped, of what was sent;
                     residual_norm; publications
    seconds          that the run took here; 0 for DDP, which others were compared with before
"""
