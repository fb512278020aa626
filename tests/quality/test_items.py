"""Items are the same for everybody, as long as asked, and say what they are to say."""

from __future__ import annotations

from typing import Any

import pytest

from kvstudy.grid.schema import Greedy, Perplexity, Retention, TextSource
from kvstudy.load.text import Text, TextError, read_text
from kvstudy.quality.items import Drawer, Item, retained


@pytest.fixture(scope="module")
def drawer(tokenizer: Any) -> Drawer:
    text = read_text(TextSource())
    return Drawer(tokenizer, Text(text.documents[:4], "", ""), 0)


def test_a_continuation_is_the_same_after_every_context(drawer: Drawer) -> None:
    spec = Perplexity(contexts=(64, 256), items=5, continuation=17)
    short, long = (drawer.perplexity(spec, context) for context in spec.contexts)
    for a, b in zip(short, long, strict=True):
        assert a.forced == b.forced and len(a.forced) == 17
        assert (len(a.prompt), len(b.prompt)) == (64, 256) and b.prompt[-64:] == a.prompt
        assert "".join(map(chr, a.prompt + a.forced)).isascii()
    assert len({item.forced for item in long}) == 5
    with pytest.raises(TextError, match="want a longer text"):
        drawer.perplexity(Perplexity(contexts=(64,), items=5000, continuation=17), 64)


@pytest.mark.parametrize("filler", ["turns", "text"])
def test_a_fact_lies_where_it_is_to_lie(drawer: Drawer, filler: str) -> None:
    spec = Retention.model_validate({"contexts": [1200], "depths": [0.0, 0.5, 1.0], "items": 3, "filler": filler})
    items = drawer.retention(spec, 1200)
    assert [item.depth for item in items] == [0.0] * 3 + [0.5] * 3 + [1.0] * 3
    for item in items:
        said = drawer.tokenizer.decode(item.prompt)
        assert 1150 < len(item.prompt) <= 1200
        assert said.count(item.answer) >= 1 and said.endswith("<assistant>")
        assert item.answer not in item.others and len(item.others) >= 3
        at = said.index(item.answer) / len(said)
        assert at < 0.1 if item.depth == 0 else abs(at - item.depth) < 0.25
    # The same fact at every depth.
    assert [item.answer for item in items[:3]] == [item.answer for item in items[6:]]


def test_in_a_session_the_question_comes_after_the_cache_was_compressed(drawer: Drawer) -> None:
    asked = {"contexts": [900], "depths": [0.0], "items": 2}
    for before, after in zip(
        drawer.retention(Retention.model_validate(asked), 900),
        drawer.retention(Retention.model_validate(asked | {"asked": "session"}), 900),
        strict=True,
    ):
        assert after.prompt + after.forced == before.prompt and before.forced == ()
        question = drawer.tokenizer.decode(after.forced)
        assert question.startswith("<user>") and question.endswith("<assistant>") and "?" in question


def test_questions_about_a_text_fit_their_context(drawer: Drawer) -> None:
    for item in drawer.greedy(Greedy(contexts=(300,), items=3, output=8), 300):
        assert 280 < len(item.prompt) <= 300 and "Explain" in drawer.tokenizer.decode(item.prompt)
    with pytest.raises(TextError, match="no room"):
        drawer.greedy(Greedy(contexts=(20,), items=1, output=8), 20)


@pytest.mark.parametrize(
    ("reply", "loose", "strict"),
    [
        ("She is called Luna.", True, True),
        ("luna", True, True),
        ("Lunar landings", True, False),
        ("Luna, or was it Felix?", True, False),
        ("Felix", False, False),
        ("", False, False),
    ],
)
def test_what_counts_as_recalled(reply: str, loose: bool, strict: bool) -> None:
    assert retained(Item(0, (1,), answer="Luna", others=("Felix", "Oscar")), reply) == (loose, strict)
