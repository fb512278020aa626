"""The authors' own forks (H2O, InfiniGen, FlexGen) behind a batch server, each in an environment of its own.

`launcher`, `arguments` and `printed` run here; `batch_server` is a package of few dependencies that runs on the fork's
Python, started as `python -m batch_server` with this folder on the path.
"""
