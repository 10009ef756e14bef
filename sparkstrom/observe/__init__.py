"""What is seen from outside: counters as plain data, progress for people."""
