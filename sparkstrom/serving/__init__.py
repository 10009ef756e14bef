"""Serve predictions of a trained model to many threads; the model can be replaced meanwhile."""
