"""The version, in one place. Driver and executors must agree on it: the master checks at join."""

__version__ = "0.1.0"
