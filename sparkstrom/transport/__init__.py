"""Moves bytes between endpoints and knows no message."""
