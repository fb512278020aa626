"""What is asked to see what a budget costs in quality."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from kvstudy.grid.schema.base import Strict
from kvstudy.grid.schema.workload import TextSource

Contexts = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
#: More is a slip of a unit or a zero: studies take tens.
Items = Annotated[int, Field(ge=1, le=100_000)]


class Perplexity(Strict):
    """Real text after contexts of it, teacher-forced under the policy: negative log-likelihood, and distance from full.

    Each of `items` places in the text gives `context` tokens, which are prefilled and compressed, and `continuation`
    tokens, which are decoded one by one. `held_out` names text that is no workload's.
    """

    contexts: Contexts
    items: Items
    continuation: Annotated[int, Field(ge=2)]


class Greedy(Strict):
    """Answers to questions about a text, greedy and until they end: where they leave full's, how long they are."""

    contexts: Contexts
    items: Items
    output: Annotated[int, Field(ge=2)]


class Retention(Strict):
    """A fact told once and asked for later, `context` tokens of conversation in all.

    `filler`: what lies between, `text` in one message or `turns` of a chat. `asked`: `prompt`, the question ends the
    prompt and is prefilled with it, as a stateless server serves a conversation; `session`, the cache was compressed
    before the question came, which is decoded, as a server that keeps a session's cache does it. `depths` are where the
    fact lies: 0 at the start, 1 at the end.
    """

    contexts: Contexts
    depths: Annotated[tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...], Field(min_length=1)]
    items: Items
    output: Annotated[int, Field(ge=2)] = 16
    filler: Literal["text", "turns"] = "turns"
    asked: Literal["prompt", "session"] = "prompt"


class Tasks(Strict):
    """EleutherAI's `lm-eval` (the extra `quality`) against the served deployment, continuations under the policy.

    `include_path`: a folder of task files of your own, relative to the checkout.
    """

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    limit: PositiveInt | None = None
    fewshot: int = Field(default=0, ge=0)
    include_path: str | None = None
    version: str


class Quality(Strict):
    """What a deployment's answers are measured by. Parts that are null are left out; `none` has none."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str = Field(default="")
    text: TextSource = TextSource()
    perplexity: Perplexity | None = None
    greedy: Greedy | None = None
    retention: Retention | None = None
    tasks: Tasks | None = None
    spot_checks: int = Field(default=1, ge=0)

    @property
    def is_empty(self) -> bool:
        """Whether it asks nothing."""
        return not (self.perplexity or self.greedy or self.retention or self.tasks)
