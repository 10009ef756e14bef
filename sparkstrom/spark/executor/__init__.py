"""Functions that run on executors, in Spark's Python workers."""
