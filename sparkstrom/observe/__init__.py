"""Monitor a fit: counters, epoch scores, progress, listeners, early stopping and reports."""
