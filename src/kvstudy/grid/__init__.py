"""What is to be measured: Hydra configuration -> typed cells -> content hash -> paths.

No other module composes configuration. `schema` types a cell, `compose` reads `conf/`, `plan` expands a
study into cells and visits, `store` says where files lie and writes them whole or not at all.
"""
