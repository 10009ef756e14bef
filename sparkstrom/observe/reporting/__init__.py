"""Pages for people: a fit's summary, and the report of a run log."""
