"""A worker's state machine, which joins, fetches a replica, publishes and relays updates."""
