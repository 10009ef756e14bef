"""Models behind the flat-parameter protocol, and a small NumPy network."""
