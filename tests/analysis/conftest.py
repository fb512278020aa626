"""Makes `fabricate` importable: made-up stores are shared by the tests of analysis, tracking and report."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
