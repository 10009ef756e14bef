"""One command per figure: ``python -m benchmarks.NAME --json`` prints one object per line."""
