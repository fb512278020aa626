"""Answers with evidence which KV-cache strategy should serve a model on given hardware under a given load.

The packages follow the way of the data: `grid` (what is to be measured), `load` (what is offered),
`frameworks` and `engine` (what serves it), `measure` (one visit), `tracking`, `analysis`, `report`.
"""

__version__ = "0.1.0"

#: Version of everything that can change a measured number: engine, load, measure, frameworks, quality.
#: It is part of every cell's identity; CI fails when those packages change and this does not.
HARNESS_VERSION = 3
