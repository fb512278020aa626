"""One request as the engine sees it: what was asked, how far it is, and when things happened."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from kvstudy.engine.text import Detokenizer

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What is asked of the output. `temperature` 0 is greedy."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report each token's log probability and those of this many best; None reports none."""
    prompt_logprobs: bool = False
    """Report the prompt's tokens too, but the first, as `logprobs` says; they are prefill's."""
    forced_tokens: tuple[int, ...] | None = None
    """Teacher forcing: the output begins with these, whatever the logits say."""
    return_logits: bool = False
    """Keep the float32 logits each output token was chosen from (tests and quality scoring)."""


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way. Times are `time.monotonic()` seconds."""

    prompt: list[int]
    params: SamplingParams
    policy: str
    id: int = field(default_factory=lambda: next(_ids))
    status: Status = Status.WAITING
    computed: int = 0
    """Tokens whose KV has been computed: the true position of the next token to go through the model."""
    output: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    """Of each output token: its log probability, and (token, log probability) of the best."""
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    """The same of each prompt token but the first."""
    logits: list[torch.Tensor] = field(default_factory=list)
    has_waited: bool = False
    """Whether a step left it in the queue."""
    finish_reason: str | None = None
    """`stop`, `length`, or `abort`."""
    kv: Any = None
    """The policy's state of this request; nobody else looks into it."""
    window_kv: Any = None
    """Its ring in each sliding-window layer; None in models without."""
    reserved: tuple[int, int] = (0, 0)
    """Bytes promised now, on the device and on the host."""
    text: Detokenizer | None = None
    generator: torch.Generator | None = None
    attended_entries: int = 0
    """Entries its decode steps attended to, a layer and KV head on average; `full_entries` is what `full`
    would have.
    """
    full_entries: int = 0
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    prefilled: float | None = None
    finished: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)

    @property
    def forced_token(self) -> int | None:
        """What the next output token is forced to be."""
        forced = self.params.forced_tokens
        return forced[len(self.output)] if forced is not None and len(self.output) < len(forced) else None

    @property
    def in_prefill(self) -> bool:
        """Whether some of the prompt is still to be computed."""
        return self.computed < len(self.prompt)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is Status.FINISHED

    def timing(self) -> dict[str, float | None]:
        """Server-side seconds by phase: queue (until admission), prefill, decode; None where not reached."""

        def span(a: float | None, b: float | None) -> float | None:
            return None if a is None or b is None else round(b - a, 6)

        return {
            "queue_s": span(self.submitted, self.admitted),
            "prefill_s": span(self.admitted, self.prefilled),
            "decode_s": span(self.prefilled, self.finished),
        }
