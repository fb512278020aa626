"""Secrets of the environment (hub token, tracking password, API keys), kept out of all that is written or started.

A secret is the value of a variable whose name says so, or the password in a URL that a variable holds. Programs of
others are started without them, and texts that others wrote (a server's log, an error) are redacted before they are
stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import unquote

#: What clients must send to a server of ours; never an option of a command, which everybody on the machine can read.
API_KEY = "KVSTUDY_API_KEY"

_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)(_|$)", re.I)
_URL = re.compile(r"(://[^/@\s:]*):([^@/\s]+)@")
#: A shorter value would redact ordinary words.
_SHORTEST = 8


def _is_secret(name: str, value: str) -> bool:
    return bool(_NAME.search(name) or _URL.search(value))


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that hold secrets."""
    return {name: value for name, value in environment.items() if not _is_secret(name, value)}


def values() -> list[str]:
    """The secrets of this process's environment, as they may be written, the longest first."""
    found: set[str] = set()
    for name, value in os.environ.items():
        if _NAME.search(name):
            found.add(value)
        for _, password in _URL.findall(value):
            found |= {password, unquote(password)}
    return sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)


def redact(text: str) -> str:
    """The text with stars for each secret and for each password in a URL."""
    for value in values():
        text = text.replace(value, "***")
    return _URL.sub(r"\1:***@", text)
