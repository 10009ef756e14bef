"""Rows on their way from what users have to records of one width."""
