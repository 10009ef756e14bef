"""Models on disk: plain arrays beside a description, written atomically."""
