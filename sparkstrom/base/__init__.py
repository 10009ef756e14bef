"""Foundations that every other package may import: errors, ids, clock, units, option types."""
