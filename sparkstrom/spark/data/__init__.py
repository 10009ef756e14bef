"""Check users' RDDs and DataFrames, distribute their rows over workers, and export rows."""
