"""Render a fit's results for people: the training summary, and the HTML report of a run log."""
