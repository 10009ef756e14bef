"""Run round-based training (parameter averaging and DiLoCo) as Spark jobs on RDDs or DataFrames.

In each round, all workers start with the same parameters and train some minibatches. Their results
are then averaged, and the next round starts with the average.
"""
