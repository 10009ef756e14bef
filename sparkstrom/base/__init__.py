"""Provide the basics that every other package may import: errors, ids, clocks, units, options."""
