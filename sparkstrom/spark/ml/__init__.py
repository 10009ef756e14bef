"""An Estimator and a Model for Spark ML pipelines, their Params and their files."""
