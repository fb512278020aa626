"""`python -m kvstudy.tracking.sync`: the command of `mlflow_sync`."""

from kvstudy.tracking.mlflow_sync import main

if __name__ == "__main__":
    raise SystemExit(main())
