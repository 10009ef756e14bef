"""Integrate training with Spark ML: an Estimator and a Model for pipelines and tuning."""
