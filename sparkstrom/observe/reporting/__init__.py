"""What people read of a fit: the summary's page, and the report of a run log."""
