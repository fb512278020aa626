"""Scores items through a served deployment's OpenAI endpoint: vLLM's cells, and the spot checks of our own.

The same requests go to every server: token ids, `echo` and `logprobs` for what is given, greedy completions for what is
said. Our engine is told where a prompt ends and decodes the rest (`kvstudy_context_tokens`); vLLM, whose cache is
whole, computes all of it as a prompt, which is the same but for rounding. A distribution over the whole vocabulary does
not come through an endpoint: `kl` is not measured there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvstudy.frameworks import http
from kvstudy.frameworks.base import Counters
from kvstudy.quality.items import Item
from kvstudy.quality.score import Row, Run, divergence, recall

#: Bound on one request: a context of thousands of tokens on one core.
TIMEOUT_S = 600.0
#: Requests in flight: enough for a batch, few enough to queue nowhere.
IN_FLIGHT = 8


@dataclass(frozen=True)
class Scored:
    """A continuation's tokens after its first: log probability of each, and whether it was the likeliest."""

    logprobs: tuple[float, ...]
    best: tuple[str, ...]


@dataclass(frozen=True)
class Said:
    """A greedy completion: its text, and its tokens' texts without the one that ends it."""

    text: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Endpoint:
    """A server's completions."""

    url: str
    model: str
    counters: Callable[[], Counters] = Counters

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sent = json.dumps({"model": self.model, "temperature": 0, **body}).encode()
        answer: dict[str, Any] = json.loads(http.request(f"{self.url}/v1/completions", timeout=TIMEOUT_S, data=sent))
        return answer

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> Scored:
        """Teacher-forced scores of a continuation's tokens but the first, which is prefill's."""
        body = {
            "prompt": [*prompt, *continuation],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "kvstudy_context_tokens": len(prompt),
        }
        own = self._post(body)["choices"][0]["logprobs"]
        begin, end = len(prompt) + 1, len(prompt) + len(continuation)
        best = [max(top, key=top.__getitem__) for top in own["top_logprobs"][begin:end]]
        return Scored(tuple(map(float, own["token_logprobs"][begin:end])), tuple(best))

    def answer(self, prompt: Sequence[int], tokens: int) -> Said:
        """A greedy completion."""
        found = self._post({"prompt": list(prompt), "max_tokens": tokens, "logprobs": 1})
        choice = found["choices"][0]
        # The end-of-sequence token is counted by all, and named or left out as each likes.
        said = int(found["usage"]["completion_tokens"]) - (choice["finish_reason"] == "stop")
        return Said(str(choice["text"]), tuple(choice["logprobs"]["tokens"][:said]))

    def score_all(self, items: Sequence[Item]) -> list[Scored]:
        """`score` of each item, some at a time."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(lambda item: self.score(item.prompt, item.forced), items))

    def answer_all(self, items: Sequence[Item], tokens: int) -> list[Said]:
        """`answer` of each item, some at a time."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(lambda item: self.answer((*item.prompt, *item.forced), tokens), items))


class ServedScorer:
    """A full cache behind an endpoint beside our engine's: the rows of `Scorer`, `kl` apart."""

    def __init__(self, endpoint: Endpoint, name: Callable[[int], str], kv_bytes_per_token: int) -> None:
        """`name` is the text of one token."""
        self.endpoint = endpoint
        self.name = name
        self.kv_bytes_per_token = kv_bytes_per_token
        self.off: list[float] = []
        """How far each token's log probability was from our engine's."""

    def rows(self, part: str, context: int, runs: Sequence[Run], output: int) -> list[Row]:
        """The rows of one part; `runs` are our full cache's, an item each."""
        items = [run.item for run in runs]
        if part == "perplexity":
            scores = self.endpoint.score_all(items)
            return [row for run, own in zip(runs, scores, strict=True) for row in self._scored(context, run, own)]
        found = []
        for run, said in zip(runs, self.endpoint.answer_all(items, output), strict=True):
            base = self._row(run.item, context)
            if part == "greedy":
                full = run.request.output[: -1 if run.request.finish_reason == "stop" else None]
                found += divergence(base, said.tokens, [self.name(token) for token in full])
            else:
                found += recall(base, run.item, said.text, run.reply)
        return found

    def _scored(self, context: int, run: Run, own: Scored) -> list[Row]:
        count = len(run.logp)
        self.off += [abs(a - b) for a, b in zip(own.logprobs, run.logp, strict=True)]
        agreed = sum(mine == self.name(token) for mine, token in zip(own.best, run.best, strict=True))
        base = self._row(run.item, context) | {"weight": float(count)}
        return [
            base | {"measure": "nll", "value": -sum(own.logprobs) / count, "reference": -sum(run.logp) / count},
            base | {"measure": "top1", "value": agreed / count, "reference": 1.0},
        ]

    def _row(self, item: Item, context: int) -> Row:
        return {
            "context": context,
            "depth": item.depth,
            "item": item.number,
            "reference": math.nan,
            "weight": 1.0,
            "kept": 1.0,
            "attended": 1.0,
            "kv_device_bytes": float(self.kv_bytes_per_token * len(item.prompt)),
            "kv_host_bytes": 0.0,
        }
