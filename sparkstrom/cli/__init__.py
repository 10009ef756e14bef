"""The ``sparkstrom`` command and its sub-commands."""
