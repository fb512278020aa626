"""The items that quality is measured on, drawn from text and seed alone: the same for every deployment.

* *perplexity*: places in the text; the same `continuation` after 256 tokens before it, after 512, and so on.
* *greedy*: a passage in a chat message, and a question about it.
* *retention*: a fact told in a conversation and asked for at its end; every value of a fact is as likely as any other,
  so that nothing but the conversation can tell it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvstudy.grid.schema import Greedy, Perplexity, Retention
from kvstudy.load.text import Text, TextError

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Item:
    """A prompt, what is forced after it, and what is to be found in the answer."""

    number: int
    prompt: tuple[int, ...]
    forced: tuple[int, ...] = ()
    """Tokens decoded under the policy before, or instead of, what it says itself."""
    depth: float = float("nan")
    answer: str = ""
    others: tuple[str, ...] = ()
    """What the answer might have been."""


_NUMBERS = ("4821", "7359", "1604", "9273", "5148")
#: A fact, its question, and the values it may have: short, and none part of another.
FACTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Anna's cat is called {}.", "What is the name of Anna's cat?", ("Oscar", "Luna", "Simba", "Felix", "Nala")),
    ("The number of Tom's locker is {}.", "What is the number of Tom's locker?", _NUMBERS),
    ("The number of the hotel room is {}.", "What is the number of the hotel room?", _NUMBERS),
    ("Emma's dog is called {}.", "What is the name of Emma's dog?", ("Rex", "Bella", "Rocky", "Buddy", "Max")),
    ("Maria's favourite fruit is the {}.", "What is Maria's favourite fruit?", ("mango", "cherry", "banana", "peach")),
    ("The meeting is on {}.", "On which day is the meeting?", ("Monday", "Tuesday", "Thursday", "Friday", "Saturday")),
    ("The colour of John's car is {}.", "What is the colour of John's car?", ("green", "purple", "orange", "yellow")),
    ("The number of the train is {}.", "What is the number of the train?", _NUMBERS),
)
NOTED = "Understood."
READ = "OK."
ABOUT = "{}\n\nExplain in a few sentences what this text says."
#: Tokens of text in one filler turn.
TURN_TOKENS = 96


class Drawer:
    """Draws items from a text with a model's tokenizer. `seed` decides all of them."""

    def __init__(self, tokenizer: Any, text: Text, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.ids = self._tokens("\n\n".join(text.documents))
        # What a conversation is filled with: without code and tables, which a small model would go on with.
        lines = (line for document in text.documents for line in document.split("\n"))
        prose = "\n".join(line for line in lines if not line.startswith((" ", "\t")))
        self.prose = self._tokens(re.sub(r"\n{3,}", "\n\n", prose))

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _random(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *key))))

    def perplexity(self, spec: Perplexity, context: int) -> list[Item]:
        """Items whose continuations lie apart and are the same for every context of the part."""
        longest, length = max(spec.contexts), spec.continuation
        room = (len(self.ids) - longest) // spec.items
        if room < length:
            raise TextError(
                f"{spec.items} continuations of {length} tokens after {longest} want a longer text ({len(self.ids)})"
            )
        items = []
        for number in range(spec.items):
            at = longest + number * room + self._random("place", number).randrange(room - length + 1)
            items.append(Item(number, tuple(self.ids[at - context : at]), tuple(self.ids[at : at + length])))
        return items

    def greedy(self, spec: Greedy, context: int) -> list[Item]:
        """Chat prompts of `context` tokens, or a few less."""
        return [self._about(context, number) for number in range(spec.items)]

    def _about(self, context: int, number: int) -> Item:
        start = self._random("greedy", context, number).random()

        def messages(tokens: int) -> Messages:
            return [{"role": "user", "content": ABOUT.format(self._passage(start, tokens))}]

        return Item(number, tuple(self._longest(messages, context)[1]))

    def retention(self, spec: Retention, context: int) -> list[Item]:
        """Conversations of `context` tokens, or a few less, a depth after another."""
        return [
            self._conversation(spec, context, depth, number) for depth in spec.depths for number in range(spec.items)
        ]

    def _conversation(self, spec: Retention, context: int, depth: float, number: int) -> Item:
        # The same facts and filler at every depth: only where the fact lies differs.
        lots = self._random("retention", context, number)
        fact, question, values = FACTS[number % len(FACTS)]
        value = lots.choice(values)
        told: Messages = [
            {"role": "user", "content": fact.format(value)},
            {"role": "assistant", "content": NOTED},
        ]
        asked: Messages = [{"role": "user", "content": question}]
        turns = max(1, context // (TURN_TOKENS + 16)) if spec.filler == "turns" else 1
        starts = [lots.random() for _ in range(turns)]

        def pieces(tokens: int) -> list[Messages]:
            """Filler of so many tokens in all, in turns, or before and after the fact."""
            share, found = tokens // turns, []
            for turn, start in enumerate(starts):
                size = share + (tokens - share * turns if turn == turns - 1 else 0)
                found.append(self._reading(self._passage(start, size)))
            return found

        def conversation(tokens: int) -> Messages:
            if spec.filler == "text":
                whole = self._passage(starts[0], tokens)
                cut = round(depth * len(whole))
                parts = [whole[:cut], whole[cut:]]
                read = [self._reading(part) if part.strip() else [] for part in parts]
                return [*read[0], *told, *read[1], *asked]
            filler = pieces(tokens)
            before = round(depth * len(filler))
            return [*chain(*filler[:before]), *told, *chain(*filler[before:]), *asked]

        tokens, ids = self._longest(conversation, context)
        forced: tuple[int, ...] = ()
        if spec.asked == "session":
            before = self._chat(conversation(tokens)[:-1], ended=True)
            if ids[: len(before)] != before:
                raise TextError("asked: session needs a chat template that puts a turn as it put it before")
            ids, forced = before, tuple(ids[len(before) :])
        return Item(number, tuple(ids), forced, depth, value, tuple(v for v in values if v != value))

    @staticmethod
    def _reading(passage: str) -> Messages:
        return [{"role": "user", "content": passage}, {"role": "assistant", "content": READ}]

    def _passage(self, start: float, tokens: int) -> str:
        """Prose of about so many tokens from a place between the text's start (0) and its end (1)."""
        at = int(start * max(1, len(self.prose) - tokens))
        passage: str = self.tokenizer.decode(self.prose[at : at + tokens])
        return passage.strip()

    def _chat(self, messages: Messages, ended: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=not ended, return_dict=False
        )
        return ids

    def _longest(self, messages: Callable[[int], Messages], context: int) -> tuple[int, list[int]]:
        """How many tokens of filler make the chat `context` tokens long, or as little less as goes; and that chat."""
        low, high = 0, context
        best: tuple[int, list[int]] | None = None
        while low <= high:
            middle = (low + high) // 2
            ids = self._chat(messages(middle))
            if len(ids) <= context:
                best, low = (middle, ids), middle + 1
            else:
                high = middle - 1
        if best is None:
            raise TextError(f"a context of {context} tokens has no room for the question: make it longer")
        return best


def retained(item: Item, reply: str) -> tuple[bool, bool]:
    """Whether a reply has the fact: as a substring (the paper's test), and as a word with no other value beside it."""
    said = reply.lower()
    words = "".join(c if c.isalnum() else " " for c in said).split()
    loose = item.answer.lower() in said
    return loose, item.answer.lower() in words and not any(other.lower() in words for other in item.others)
