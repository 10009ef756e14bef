"""Checkpoints of a running fit and saved models, as files that are written atomically."""
