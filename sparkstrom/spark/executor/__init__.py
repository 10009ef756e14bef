"""Functions that run in Spark's Python workers."""
