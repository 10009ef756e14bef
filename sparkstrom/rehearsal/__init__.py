"""Rehearsals: simulate a fit with k workers in virtual time, with the user's own model and rows."""
