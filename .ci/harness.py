"""Holds the rule of `harness_version`: code that can change a measured number does not change in silence.

`.ci/harness.yaml` is a log of the digests of engine, frameworks, load, measure and quality. When they change, either
HARNESS_VERSION is raised (old cells are then measured again) or the new entry says why it need not be:

    python .ci/harness.py                       check (run by `make lint`)
    python .ci/harness.py --record "docstrings only"   add an entry for what is there now
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".ci" / "harness.yaml"
PACKAGES = ("engine", "frameworks", "load", "measure", "quality")


def sources_digest() -> str:
    """Digest of those packages' code; Python is parsed, so that layout and comments do not count."""
    total = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / "src" / "kvstudy" / package).rglob("*")):
            if path.suffix == ".py":
                body = ast.dump(ast.parse(path.read_text(encoding="utf-8")))
            elif path.suffix in (".c", ".h"):
                body = path.read_text(encoding="utf-8")
            else:
                continue
            total.update(f"{path.relative_to(ROOT)}\n{body}\n".encode())
    return total.hexdigest()[:16]


def version() -> int:
    """HARNESS_VERSION as the package states it, read without importing it."""
    for node in ast.parse((ROOT / "src/kvstudy/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HARNESS_VERSION":
            return int(ast.literal_eval(node.value))
    raise SystemExit("src/kvstudy/__init__.py states no HARNESS_VERSION")


def problem(entries: list[dict[str, object]], now: str, stated: int) -> str | None:
    """What is wrong, in one line; None when the log agrees with the code."""
    if not entries or entries[-1]["sources"] != now:
        return (
            "engine, frameworks, load or measure changed: raise HARNESS_VERSION in src/kvstudy/__init__.py if a "
            'measured number can change, then run: python .ci/harness.py --record "why it need not be raised"'
        )
    if entries[-1]["version"] != stated:
        return f"HARNESS_VERSION is {stated}, the log's last entry says {entries[-1]['version']}"
    for before, after in itertools.pairwise(entries):
        if before["version"] == after["version"] and not str(after.get("why", "")).strip():
            return f"entry {after['sources']} keeps version {after['version']} and says no reason"
    return None


def main(argv: list[str]) -> int:
    """Check, or record what is there."""
    entries = yaml.safe_load(LOG.read_text()) if LOG.is_file() else []
    now, stated = sources_digest(), version()
    if argv[:1] == ["--record"] and (not entries or entries[-1]["sources"] != now):
        entries.append({"version": stated, "sources": now, "why": " ".join(argv[1:])})
        LOG.write_text(yaml.safe_dump(entries, sort_keys=False, width=110))
    fault = problem(entries, now, stated)
    if fault:
        print(f"harness: {fault}", file=sys.stderr)
    return 1 if fault else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
