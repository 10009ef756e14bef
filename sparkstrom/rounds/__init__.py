"""Train in synchronous rounds on any backend: parameter averaging and DiLoCo.

In a round, each worker trains alone for some minibatches; then the results are combined.
"""
