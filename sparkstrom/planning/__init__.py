"""Estimate, before a fit runs, the resources that it needs and its speed with more workers."""
