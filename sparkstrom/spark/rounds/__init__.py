"""Train fits in rounds (parameter averaging and DiLoCo) as Spark jobs, with RDDs or DataFrames.

In each round all workers train some minibatches from the same parameters. Their results are then
averaged, and the next round starts from the average.
"""
