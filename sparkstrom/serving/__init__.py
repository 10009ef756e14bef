"""Serving: answers of a trained model to many threads, and its replacement while they ask."""
