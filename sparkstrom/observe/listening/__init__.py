"""Listeners that come with the package, and what any listener may hear."""
