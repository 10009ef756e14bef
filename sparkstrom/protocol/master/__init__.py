"""The master's state machine: it admits workers, numbers updates and ends the fit."""
