"""What master and workers have in common: events, children, histories, windows, the topology."""
