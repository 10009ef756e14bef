"""The command-line program ``sparkstrom`` and its sub-commands, one module for each."""
