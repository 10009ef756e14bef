"""The version of the package. The master rejects workers that run another version."""

__version__ = "0.1.0"
