"""Train in synchronous rounds, on any backend: parameter averaging and DiLoCo."""
