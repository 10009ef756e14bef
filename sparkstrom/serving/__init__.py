"""Predictions with one trained model for many threads; the model can be replaced meanwhile."""
