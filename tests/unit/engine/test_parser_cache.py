"""Parsers of a grammar share what they have learnt: it changes no mask, and its limit ends no later answer."""

from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
from llguidance import LLMatcher, LLParserLimits

import moonpool.base.bundled
from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.grammar import Grammar
from moonpool.engine import parser_cache
from moonpool.engine.parser_cache import KeptParser, ParserCache, begun
from moonpool.engine.processor_time import ProcessorTime
from moonpool.engine.structured_output import MaskBuilder, MaskRequest

FOLDER = Path(moonpool.base.bundled.__file__).parent / "tiny"
CONFIG = load_config(FOLDER)
MANY = Grammar("regex", "([a-f ]*a[a-f ]{9}){1,50}")
"""Each answer meets other states of it."""
SEEDS = range(12)


@pytest.fixture
def parsers() -> Iterator[Callable[[], ParserCache]]:
    made: list[ParserCache] = []

    def make() -> ParserCache:
        load, ends = (lambda: Tokenizer.load(FOLDER)), CONFIG.eos_token_ids
        made.append(ParserCache(load, CONFIG.vocab_size, ends, nullcontext, lambda: False))
        return made[-1]

    yield make
    for made_parser in made:
        made_parser.close()


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(max_lexer_states=1_000, verbose_errors=False)
    monkeypatch.setattr(parser_cache, "LIMITS", limits)


def follow(parser: LLMatcher, seed: int, tokens: int = 20) -> list[bytes]:
    """The masks of an answer of so many tokens, and then the tokens; fewer where it has ended or failed."""
    random, answer, masks = Random(seed), array("i"), []
    for _ in range(tokens):
        bits = int.from_bytes(mask := parser.compute_bitmask(), "little")
        fits = [token for token in range(CONFIG.vocab_size) if bits >> token & 1 and token not in CONFIG.eos_token_ids]
        if parser.is_error() or not fits:
            break
        masks.append(mask)
        answer.append(random.choice(fits))
        assert parser.consume_token(answer[-1])
    return [*masks, answer.tobytes()]


def parser_of(made: ParserCache, grammar: Grammar, answer: bytes = b"") -> LLMatcher:
    return begun(made.compiled(grammar).result(), answer)


def test_what_earlier_answers_have_met_changes_no_mask(parsers: Callable[[], ParserCache]) -> None:
    for grammar in (Grammar("json_object", ""), MANY):
        used, fresh = parsers(), parsers()
        for seed in range(3):
            follow(parser_of(used, grammar), seed)
        assert follow(parser_of(used, grammar), 3) == follow(parser_of(fresh, grammar), 3)


@pytest.mark.usefixtures("few_states")
def test_a_grammar_whose_states_earlier_answers_have_used_up_is_compiled_anew(
    parsers: Callable[[], ParserCache],
) -> None:
    made = parsers()
    used_up = made.compiled(MANY)
    *_, answer = follow(parser_of(made, MANY), 0, 5)
    last = parser_of(made, MANY, answer)
    for seed in SEEDS:
        *_, made_parser = follow(kept := parser_of(made, MANY), seed)
        if kept.is_error():
            break
        made.keep(MANY, made_parser, KeptParser(kept, used_up, ProcessorTime()))
    else:
        pytest.fail("they never were used up")
    assert len(follow(last, 1)) <= 20, "the library counts them for all its copies: else nothing need be made anew"
    made.forget(MANY, used_up)
    anew = made.compiled(MANY)
    assert follow(parser_of(made, MANY, answer), 1) == follow(parser_of(parsers(), MANY, answer), 1)
    made.forget(MANY, used_up)
    assert made.compiled(MANY) is anew, "a second failure of the old one costs no further compilation"
    assert made.known(MANY, made_parser) is None


@pytest.mark.usefixtures("few_states")
def test_answers_go_on_when_earlier_ones_have_used_up_a_grammars_states() -> None:
    masks = MaskBuilder(lambda: Tokenizer.load(FOLDER), CONFIG.vocab_size, CONFIG.eos_token_ids)
    for seed in SEEDS:
        random, made = Random(seed), masks.begin([MaskRequest(0, MANY, b"")])
        for _ in range(20):
            assert made is not None
            assert made.now().failed == {}
            bits = int.from_bytes(made.now().masks[0], "little")
            made = masks.advance([random.choice([token for token in range(3, CONFIG.vocab_size) if bits >> token & 1])])
    masks.close()
