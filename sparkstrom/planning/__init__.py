"""Estimate the resources that a fit needs, and its speed with more workers, before it runs."""
