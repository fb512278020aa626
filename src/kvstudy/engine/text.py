"""Tokens to text as they come: never half a character, and stop strings cut out before they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one request's output.

    Decoding a token alone loses what its neighbours decide (spaces, multi-token characters). As vLLM and TGI
    do, a short window of tokens is decoded twice, without and with the new token, and the difference is the
    new text; as long as it ends in an unfinished character it is held back. Text that could be the beginning
    of a stop string is held back, too.
    """

    WINDOW = 6

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-self.WINDOW :])
        self._prefix = 0
        """Tokens from here to `_read` are context: their text has been given out."""
        self._read = len(self._tokens)
        self._stop = tuple(s for s in stop if s)
        self._pending = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that can be shown now that `token` is known; sets `stopped` when a stop string is complete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._prefix = self._read
        self._read = len(self._tokens)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """What was held back, at the end of a generation that no stop string ended."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        text = self._release(after[len(before) :]) + ("" if self.stopped else self._pending)
        self._pending = ""
        self._prefix = self._read = len(self._tokens)
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._pending + new
        found = min((at for at in (text.find(s) for s in self._stop) if at >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            self._pending = ""
            return text[:found]
        hold = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._pending = text[len(text) - hold :]
        return text[: len(text) - hold]
