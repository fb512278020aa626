"""MLflow as a view of the store: one command reconciles it, nothing else writes to it.

Importing this package does not import MLflow (two seconds); `mlflow_sync` does when it runs.
"""
