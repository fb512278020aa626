"""What is asked of a server: texts, lengths, and what prompts share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from kvstudy.grid.schema.base import Strict, number
from kvstudy.grid.schema.lengths import (
    Length,
    length_label,
    mean_tokens,
)


class TextSource(Strict):
    """Where prompts come from.

    `pydoc` is English text that every Python has: a stand-in, and every caption says so.
    """

    kind: Literal["pydoc", "hub", "jsonl"] = "pydoc"
    hub_id: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    path: str | None = None
    field: str = "text"

    @model_validator(mode="after")
    def _source_is_complete(self) -> TextSource:
        needs = {"pydoc": (), "hub": ("hub_id", "revision"), "jsonl": ("path",)}[self.kind]
        missing = [key for key in needs if getattr(self, key) is None]
        if missing:
            raise ValueError(f"text kind '{self.kind}' needs {', '.join(missing)}")
        return self


class SharedPrefix(Strict):
    """What prompts have in common from their start.

    `common`: the first `share` of each prompt is one of `groups` prefixes. `sessions`: `active` conversations take
    turns; each of a session's `turns` prompts repeats all earlier ones (drawn text stands for the answers) and adds the
    drawn length.
    """

    kind: Literal["common", "sessions"] = "common"
    share: float = Field(default=0.0, ge=0.0, le=0.9)
    groups: PositiveInt = 1
    turns: PositiveInt = 4
    active: PositiveInt = 4


class Workload(Strict):
    """What is asked: text, lengths, and the share of long requests (the paper's "mix")."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    title: str = Field(default="")
    text: TextSource = TextSource()
    prompt: Length
    long_prompt: Length | None = None
    long_share: float = Field(default=0.0, ge=0.0, le=1.0)
    output: Length
    long_output: Length | None = None
    shared_prefix: SharedPrefix = SharedPrefix()
    api: Literal["completions", "chat"] = "completions"
    ignore_eos: bool = True
    temperature: float = Field(default=0.0, ge=0.0)

    def tokens_a_request(self) -> float:
        """Prompt and output tokens of a request in the mean, long ones included (sessions: of a first turn)."""
        short = mean_tokens(self.prompt) + mean_tokens(self.output)
        if self.long_prompt is None:
            return short
        long = mean_tokens(self.long_prompt) + mean_tokens(self.long_output or self.output)
        return (1.0 - self.long_share) * short + self.long_share * long

    @model_validator(mode="after")
    def _mix_is_defined(self) -> Workload:
        if self.long_share > 0 and self.long_prompt is None:
            raise ValueError("long_share above 0 needs long_prompt")
        if self.api == "chat" and (self.shared_prefix.share > 0 or self.shared_prefix.kind == "sessions"):
            raise ValueError("shared_prefix needs api=completions: a chat template would come between")
        return self


def workload_label(workload: Workload) -> str:
    """The part of a workload that reads in a cell's name: mix-p128-384-o64-192-l0.1, chat-p512-o64-s0.5."""
    parts = [workload.name, f"p{length_label(workload.prompt)}", f"o{length_label(workload.output)}"]
    if workload.long_prompt is not None:
        parts.append(f"l{number(workload.long_share)}")
    prefix = workload.shared_prefix
    if prefix.kind == "sessions":
        parts.append(f"turns{prefix.turns}x{prefix.active}")
    if prefix.share > 0:
        parts.append(f"s{number(prefix.share)}" + (f"x{prefix.groups}" if prefix.groups > 1 else ""))
    return "-".join(parts)
