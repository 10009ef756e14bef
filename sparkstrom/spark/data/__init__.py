"""Check the columns of users' RDDs and DataFrames, distribute rows over workers, export rows."""
