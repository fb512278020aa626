"""`echo` with `logprobs`: the probability of a given continuation, under the cache that would have been there.

OpenAI's `/v1/completions` answers `echo` with the prompt itself and each of its tokens' log probabilities; evaluation
harnesses (EleutherAI's `lm-eval`) send context and continuation as one prompt and read the last ones. Computing all of
it as a prompt would score the continuation with exact attention, and every policy like the full cache. So an echoed
prompt has a boundary: up to it it is a prompt, prefilled and then compressed; what follows is decoded token by token,
as if the model were saying it. The first token after the boundary is predicted by the prompt's last: it is prefill's
under every policy, as it is when an answer is generated.

`kvstudy_context_tokens` says where the boundary is (`kvstudy quality` and its `lm-eval` model send it). A client that
does not know of it gets a guess: the last half of the prompt is decoded, `GUESSED_TOKENS` at most. Then a short
continuation is preceded by a little of its context that was decoded too, and a budget that is a share of the prompt is
one of what lies before the boundary. With the whole cache the boundary makes no difference but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstudy.engine.request import Request

GUESSED_TOKENS = 64


@dataclass(frozen=True)
class Echo:
    """A prompt that is echoed: `context` tokens of `ids` are prefilled, the others decoded."""

    ids: tuple[int, ...]
    context: int
    text: str
    """The prompt as text."""

    @classmethod
    def of(cls, ids: Sequence[int], text: str, context: int | None) -> Echo:
        """With a client's boundary, or the guess. Raises `ValueError` for a boundary that is none."""
        count = len(ids)
        if context is None:
            context = max(count - GUESSED_TOKENS, -(-count // 2))
        if not 1 <= context <= count:
            raise ValueError(f"kvstudy_context_tokens must be between 1 and the prompt's {count} tokens, not {context}")
        return cls(tuple(ids), context, text)

    @property
    def forced(self) -> tuple[int, ...]:
        """What is decoded of the prompt."""
        return self.ids[self.context :]

    def logprobs(self, request: Request, name: Callable[[int], str], answered: int) -> dict[str, Any] | None:
        """OpenAI's object over the prompt and the first `answered` tokens of the answer; None where none was asked for.

        The first token has none: nothing precedes it.
        """
        if request.params.logprobs is None:
            return None
        tokens = [*self.ids, *request.output[len(self.forced) :][:answered]]
        scored = [*request.prompt_logprobs, *request.logprobs][: len(tokens) - 1]
        names = [name(token) for token in tokens]
        offsets = [0]
        for text in names[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": names,
            "token_logprobs": [None, *(own for own, _ in scored)],
            "top_logprobs": [None, *({name(t): p for t, p in best} for _, best in scored)],
            "text_offset": offsets,
        }
