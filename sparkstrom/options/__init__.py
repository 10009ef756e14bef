"""The options of the training masters: declarations, checks, and where their values come from."""
