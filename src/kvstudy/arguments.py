"""Types of command-line arguments that several commands take."""

from __future__ import annotations

import argparse


def port(text: str) -> int:
    """A TCP port, 0 for any that is free. Raises ArgumentTypeError outside 0..65535: a socket would wrap it around."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")
    return int(text)
