"""Are these really H2O and InfiniGen? Our rules against numbers computed by the authors' own code.

    python -m kvstudy.engine.fidelity FOLDER

FOLDER (or any folder below it) holds what `tests/fidelity/data/README.md` describes: random models, inputs, and the
authors' logits, masks, scores, evicted slots and fetched entries. Serving rules go through the engine as it serves
(`served`); simulations that cannot serve go through the same rule code on a plain forward (`h2o`, `infinigen`).
"""

from kvstudy.engine.fidelity.check import check
from kvstudy.engine.fidelity.report import Case

__all__ = ["Case", "check"]
