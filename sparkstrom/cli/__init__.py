"""The ``sparkstrom`` command."""
