"""Spark ML's estimator and model."""
