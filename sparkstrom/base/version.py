"""The version of the package. A fit's controller rejects workers that run another version."""

__version__ = "0.1.0"
