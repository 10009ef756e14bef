"""What runs in Spark's Python workers."""
