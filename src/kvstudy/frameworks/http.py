"""Plain HTTP to a server on this machine, and the Prometheus text it answers with. Standard library only."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

# A proxy of the environment must never see what is meant for 127.0.0.1.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Sample = tuple[str, dict[str, str], float]


def request(url: str, *, timeout: float, data: bytes | None = None, key: str | None = None) -> str:
    """Body of a GET (or of a POST, with `data`); raises OSError if it fails or is not answered with 2xx."""
    asked = urllib.request.Request(url, data=data, method="GET" if data is None else "POST")
    if data is not None:
        asked.add_header("Content-Type", "application/json")
    if key is not None:
        asked.add_header("Authorization", f"Bearer {key}")
    with _OPENER.open(asked, timeout=timeout) as answer:
        body: bytes = answer.read()
    return body.decode()


def is_healthy(url: str, timeout: float = 2.0) -> bool:
    """Whether `/health` answers 200."""
    try:
        request(f"{url}/health", timeout=timeout)
    except (OSError, urllib.error.URLError, ValueError):
        return False
    return True


def get_json(url: str, *, timeout: float = 10.0, key: str | None = None) -> Any:
    """Parsed JSON of a GET."""
    return json.loads(request(url, timeout=timeout, key=key))


def parse_metrics(text: str, names: frozenset[str] | None = None) -> list[Sample]:
    """Samples (name, labels, value) of Prometheus text, those in `names` only where it is given."""
    samples = []
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        if names is not None and line.partition("{")[0].partition(" ")[0] not in names:
            continue
        found = _SAMPLE.match(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found[2])) if found[2] else {}
        samples.append((found[1], labels, float(found[3])))
    return samples


def total(samples: list[Sample], name: str, **labels: str) -> float | None:
    """Sum of the samples of a name that carry these labels; None if there is none."""
    values = [
        value
        for sample, has, value in samples
        if sample == name and all(has.get(key) == wanted for key, wanted in labels.items())
    ]
    return sum(values) if values else None
