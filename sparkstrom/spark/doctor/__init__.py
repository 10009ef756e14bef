"""`sparkstrom doctor`: whether training would work here, found out before it is tried."""
