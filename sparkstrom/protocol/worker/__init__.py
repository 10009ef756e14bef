"""A worker's state machine: it joins, fetches a replica, publishes updates, relays and leaves."""
