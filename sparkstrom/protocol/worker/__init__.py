"""A worker's state machine: it joins, fetches a replica, publishes, relays and leaves."""
