"""A worker's machine: join, fetch, replicate, publish, relay, leave."""
