"""The master's state machine, which admits workers, numbers updates and ends the fit."""
