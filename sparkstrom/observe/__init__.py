"""Monitoring of a fit: counters, epochs, progress, listeners, early stopping and reports."""
