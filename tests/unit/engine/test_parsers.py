"""Parsers that know what earlier answers have met give the masks of those that know nothing."""

from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest

import moonpool.bundled
from moonpool.checkpoint import Tokenizer, load_config
from moonpool.engine.parsers import MAX_TAUGHT, TAUGHT, Parser, Parsers
from moonpool.grammar import Grammar

FOLDER = Path(moonpool.bundled.__file__).parent / "tiny"
CONFIG = load_config(FOLDER)
GRAMMAR = Grammar("json_object", "")


@pytest.fixture
def parsers() -> Iterator[Parsers]:
    made = Parsers(lambda: Tokenizer.load(FOLDER), CONFIG.vocab_size, CONFIG.eos_token_ids, nullcontext, lambda: False)
    yield made
    made.close()


def follow(parser: Parser, seed: int, tokens: int) -> list[bytes]:
    """The masks of an answer of so many tokens, and then the tokens."""
    random, answer, masks = Random(seed), array("i"), []
    for _ in range(tokens):
        masks.append(parser.matcher.compute_bitmask())
        bits = int.from_bytes(masks[-1], "little")
        fits = [token for token in range(CONFIG.vocab_size) if bits >> token & 1 and token not in CONFIG.eos_token_ids]
        answer.append(random.choice(fits))
        assert parser.matcher.consume_token(answer[-1])
    return [*masks, answer.tobytes()]


def test_an_answer_begins_with_what_earlier_ones_have_met_and_has_the_same_masks(parsers: Parsers) -> None:
    first = parsers.take(GRAMMAR, b"")
    assert first.taught == 0
    *_, answer = follow(first, 1, TAUGHT - 1)
    parsers.keep(GRAMMAR, answer, first)
    assert parsers.take(GRAMMAR, b"").taught == 0, "that is little"
    assert parsers.take(GRAMMAR, answer) is first
    *_, more = follow(first, 2, 3)
    parsers.keep(GRAMMAR, answer + more, first)
    second = parsers.take(GRAMMAR, b"")
    assert second.taught == TAUGHT + 2
    expected = follow(parsers.take(GRAMMAR, b""), 3, 20)
    parsers.untaught(GRAMMAR, b"")
    anew = parsers.take(GRAMMAR, b"")
    assert (anew.taught, follow(anew, 3, 20)) == (0, expected)
    follow(second, 4, 1)
    assert parsers.take(GRAMMAR, answer + more) is first, "it is where it was"


def test_what_is_met_is_bounded(parsers: Parsers) -> None:
    grammar, [a] = Grammar("regex", "a*"), Tokenizer.load(FOLDER).encode("a", add_special=False)
    parser = parsers.take(grammar, b"")
    assert parser.matcher.consume_tokens([a] * (MAX_TAUGHT + 1))
    answer = array("i", [a] * (MAX_TAUGHT + 1)).tobytes()
    parsers.keep(grammar, answer, parser)
    assert parsers.take(grammar, b"").taught == 0
    parsers.keep(grammar, answer[4:], parsers.untaught(grammar, answer[4:]))
    assert parsers.take(grammar, b"").taught == MAX_TAUGHT


def test_a_parser_without_what_was_met_is_behind_the_same_answer(parsers: Parsers) -> None:
    parser = parsers.take(GRAMMAR, b"")
    *_, answer = follow(parser, 1, TAUGHT)
    parsers.keep(GRAMMAR, answer, parser)
    taught, untaught = parsers.take(GRAMMAR, answer), parsers.untaught(GRAMMAR, answer)
    assert untaught.taught == 0
    assert follow(untaught, 5, 10) == follow(taught, 5, 10)
