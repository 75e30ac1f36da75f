"""Masks of structured answers: what is chosen by them validates, wherever the parsers behind them come from."""

import json
import os
import re
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
import torch

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.grammar import Grammar
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling, SequenceStep, Step
from moonpool.engine import processor_time
from moonpool.engine.parser_cache import MAX_PARSERS
from moonpool.engine.sampling.sampler import sample
from moonpool.engine.structured_output import SLOW_NICE, STEPS_PER_MEMORY_CHECK, MaskBuilder, MaskRequest, TokenMasks
from moonpool.v1 import kv_pb2
from tests.unit.engine.schemas import SCHEMAS, record

FOLDER = model_dir()
CONFIG = load_config(FOLDER)
TOKENIZER = Tokenizer.load(FOLDER)
END = CONFIG.eos_token_ids[0]
PROMPT = array("i", [5, 6, 7])
LONGEST = 700
FORMATS = jsonschema.FormatChecker(("date", "ipv4", "uuid"))
"""Those that mean the same to both libraries: a leap second is a time to one of them."""
ANYTHING = torch.randn(16, CONFIG.vocab_size, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def masks() -> Iterator[MaskBuilder]:
    made = MaskBuilder(lambda: TOKENIZER, CONFIG.vocab_size, CONFIG.eos_token_ids)
    yield made
    made.close()


def step_of(*specs: SampleSpec) -> Step:
    return Step(1, tuple(SequenceStep(b"", 0, (), spec) for spec in specs))


def begun(masks: MaskBuilder, *specs: SampleSpec) -> dict[int, bytes]:
    made = masks.begin(MaskRequest.of(step_of(*specs)))
    assert made is not None
    assert made.now().failed == {}
    return {index: bytes(mask) for index, mask in made.now().masks.items()}


def refused(masks: MaskBuilder, *specs: SampleSpec) -> str:
    """Why the first one has no mask."""
    made = masks.begin(MaskRequest.of(step_of(*specs)))
    assert made is not None
    return made.now().failed[0]


def allowed(mask: bytes | memoryview) -> set[int]:
    return {token for token in range(CONFIG.vocab_size) if mask[token // 8] >> token % 8 & 1}


def generate(masks: MaskBuilder, params: SamplingParams, longest: int = LONGEST) -> list[int]:
    """An answer by logits that know nothing, but for the end, which they like."""
    sampling, tokens = SequenceSampling.of(params, len(PROMPT), CONFIG.eos_token_ids), array("i", PROMPT)
    while sampling.finish(tokens, longest) == kv_pb2.FINISH_REASON_UNSPECIFIED:
        spec = sampling.at(tokens)
        logits = ANYTHING[len(tokens) % 16][None].clone()
        logits[0, END] += 4
        [[token]], *_ = sample(logits, [spec], begun(masks, spec))
        tokens.append(token)
    return tokens[len(PROMPT) :].tolist()


def schema(text: object, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=600, seed=seed, response_format="json_schema", grammar=json.dumps(text))


def answer(tokens: list[int]) -> str:
    assert tokens[-1] == END, "it has come to its own end"
    return TOKENIZER.decode(tokens[:-1])


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_validate(masks: MaskBuilder, name: str) -> None:
    for seed in range(2):
        text = answer(generate(masks, schema(SCHEMAS[name], seed)))
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=FORMATS)


def test_an_object_an_expression_and_a_grammar(masks: MaskBuilder) -> None:
    tokens = generate(masks, SamplingParams(max_tokens=600, seed=1, response_format="json_object"), longest=1000)
    assert isinstance(json.loads(answer(tokens)), dict)
    pattern = r"(yes|no), [0-9]{2,4} times?"
    text = answer(generate(masks, SamplingParams(seed=2, response_format="regex", grammar=pattern)))
    assert re.fullmatch(pattern, text)
    grammar = 'start: sum\nsum: number ("+" number)+\nnumber: /[0-9]{1,3}/\n'
    text = answer(generate(masks, SamplingParams(max_tokens=400, seed=3, response_format="lark", grammar=grammar)))
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})+", text)


def test_an_answer_goes_on_anywhere_as_where_it_began(masks: MaskBuilder) -> None:
    """A mask is a function of the answer: parsers that are not at hand are made anew."""
    params = schema(record(a={"type": "integer"}, b={"type": "boolean"}))
    whole = generate(masks, params)
    sampling = SequenceSampling.of(params, len(PROMPT), CONFIG.eos_token_ids)
    elsewhere = MaskBuilder(lambda: TOKENIZER, CONFIG.vocab_size, CONFIG.eos_token_ids)
    for length in (0, 3, 2, len(whole) - 1, 1, 1, 2):
        spec = sampling.at(PROMPT + array("i", whole[:length]))
        assert begun(elsewhere, spec) == begun(masks, spec)
        assert whole[length] in allowed(begun(elsewhere, spec)[0])
    elsewhere.close()


def test_a_run_has_the_masks_of_its_steps_and_gives_its_parsers_back(masks: MaskBuilder) -> None:
    """Also when all is given up in its midst."""
    wholes = [generate(masks, schema(record(a={"type": "integer"}, b={"type": "boolean"}), seed)) for seed in (1, 2)]
    sampling = SequenceSampling.of(schema(record(a={"type": "integer"}, b={"type": "boolean"})), len(PROMPT), (END,))
    length = min(map(len, wholes)) - 1
    looks = iter([False, True])  # for the grammar, then in the run
    running = MaskBuilder(lambda: TOKENIZER, CONFIG.vocab_size, CONFIG.eos_token_ids, full=lambda: next(looks, False))

    def specs(at: int) -> list[SampleSpec]:
        return [SampleSpec(), *(sampling.at(PROMPT + array("i", whole[:at])) for whole in wholes)]

    assert length > STEPS_PER_MEMORY_CHECK
    assert begun(running, *specs(0)) == begun(masks, *specs(0))
    for at in range(1, length):
        made = running.advance([7, *(whole[at - 1] for whole in wholes)])
        assert made is not None
        assert made.now().failed == {}
        assert {index: bytes(mask) for index, mask in made.now().masks.items()} == begun(masks, *specs(at))
    assert next(looks, None) is None
    assert begun(running, *specs(length)) == begun(masks, *specs(length))
    wrong = running.advance([7, 7, 7])
    assert wrong is not None
    assert sorted(wrong.now().failed) == [1, 2]
    running.close()


def test_masks_are_made_early_unless_a_grammar_has_to_be_waited_for() -> None:
    read = threading.Event()

    def load() -> Tokenizer:
        assert read.wait(timeout=60)
        return TOKENIZER

    late = MaskBuilder(load, CONFIG.vocab_size, CONFIG.eos_token_ids)
    sampling = SequenceSampling.of(SamplingParams(response_format="regex", grammar="[ab]!"), len(PROMPT), (END,))
    made = late.begin(MaskRequest.of(step_of(sampling.at(PROMPT))))
    assert made is not None
    made.early()
    read.set()
    mask = made.now().masks[0]
    a, end = (TOKENIZER.encode(text, add_special=False)[0] for text in "a!")
    assert a in allowed(mask)
    following = late.advance([a])
    assert a in allowed(mask)
    assert following is not None
    following.early()
    assert allowed(mask) == {end}
    assert following.now().masks[0] is mask
    late.close()


def test_a_sequence_that_may_skip_is_not_waited_for() -> None:
    """Neither while its grammar is compiled, nor while its mask is made; then it gets the mask that it asked for."""
    read = threading.Event()

    def load() -> Tokenizer:
        assert read.wait(timeout=60)
        return TOKENIZER

    late = MaskBuilder(load, CONFIG.vocab_size, CONFIG.eos_token_ids)
    asked = [MaskRequest(0, Grammar("regex", "[ab]!"), b"", may_skip=True)]

    def made(alone: bool) -> TokenMasks:
        pending = late.begin(asked, alone=alone)
        assert pending is not None
        assert not pending.waits
        return pending.now()

    for alone in (False, True):
        assert (made(alone).late, made(alone).masks) == ({0}, {})
    read.set()
    while (found := made(alone=True)).late:
        assert not found.failed
    a, b = (TOKENIZER.encode(text, add_special=False)[0] for text in "ab")
    assert allowed(found.masks[0]) == {a, b}
    late.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_slow_masks_wait_for_others_on_busy_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "QUICK_NS", 0)  # all but an answer's first one
    own, had = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    @contextmanager
    def aside() -> Iterator[None]:
        had.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        yield

    masks = MaskBuilder(lambda: TOKENIZER, CONFIG.vocab_size, CONFIG.eos_token_ids, aside)
    generate(masks, SamplingParams(response_format="regex", grammar="[ab]{4}!"))
    masks.close()
    assert had[0] == own
    assert had[-1] == max(own, SLOW_NICE)


def test_masks_that_take_too_much_processor_time_end_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "ALLOWED_NS", 0)
    monkeypatch.setattr(processor_time, "ALLOWED_TOKEN_NS", 0)
    costly = MaskBuilder(lambda: TOKENIZER, CONFIG.vocab_size, CONFIG.eos_token_ids)
    assert "s of processor time for 0 tokens, which is too much" in refused(
        costly, SampleSpec(SamplingParams(response_format="regex", grammar="[ab]!"))
    )
    costly.close()


def test_samples_with_a_common_beginning_do_not_disturb_each_other(masks: MaskBuilder) -> None:
    params = schema({"enum": ["aa", "ab", "b"]})
    sampling = SequenceSampling.of(params, len(PROMPT), CONFIG.eos_token_ids)
    quote, a, b = (TOKENIZER.encode(text, add_special=False)[0] for text in ('"', "a", "b"))
    same = [sampling.at(PROMPT + array("i", given)) for given in ([quote], [quote])]
    first, second = begun(masks, *same).values()
    assert first == second
    apart = [sampling.at(PROMPT + array("i", given)) for given in ([quote, a], [quote, b])]
    after_a, after_b = (allowed(mask) for mask in begun(masks, *apart).values())
    assert {a, b} <= after_a
    assert not {a, b} & after_b


def test_more_answers_than_parsers_are_kept(masks: MaskBuilder) -> None:
    params = SamplingParams(response_format="regex", grammar="[ab]{1,12}")
    sampling = SequenceSampling.of(params, len(PROMPT), CONFIG.eos_token_ids)
    a, b = (TOKENIZER.encode(text, add_special=False)[0] for text in "ab")
    for number in range(MAX_PARSERS + 2):
        tokens = array("i", [a if number >> bit & 1 else b for bit in range(10)])
        assert {a, b, END} <= allowed(begun(masks, sampling.at(PROMPT + tokens))[0])


def test_grammars_are_given_up_when_the_process_is_full_and_made_anew(masks: MaskBuilder) -> None:
    asked: list[bool] = []

    def full() -> bool:
        asked.append(len(asked) == 1)
        return asked[-1]

    loads: list[Tokenizer] = []

    def load() -> Tokenizer:
        loads.append(TOKENIZER)
        return TOKENIZER

    crowded = MaskBuilder(load, CONFIG.vocab_size, CONFIG.eos_token_ids, full=full)
    sampling = SequenceSampling.of(schema(record(a={"type": "integer"})), len(PROMPT), CONFIG.eos_token_ids)
    tokens = array("i", PROMPT)
    for token in generate(masks, sampling.params)[:STEPS_PER_MEMORY_CHECK]:
        spec = sampling.at(tokens)
        assert begun(crowded, spec) == begun(masks, spec)
        tokens.append(token)
    assert asked == [False, True, False], "for the grammar, after some steps, and for the grammar once more"
    assert loads == [TOKENIZER]
    crowded.close()


def test_what_cannot_be_followed_has_no_mask(masks: MaskBuilder) -> None:
    """Nobody else is concerned."""
    broken = SequenceSampling.of(
        SamplingParams(response_format="regex", grammar="(["), len(PROMPT), CONFIG.eos_token_ids
    )
    fine = SequenceSampling.of(SamplingParams(response_format="regex", grammar="x"), len(PROMPT), CONFIG.eos_token_ids)
    specs = (broken.at(PROMPT), SampleSpec(), fine.at(PROMPT))
    assert "regex cannot be followed" in refused(masks, *specs)
    assert END not in allowed(begun(masks, *specs[1:])[1])
    made = masks.begin(MaskRequest.of(step_of(*specs)))
    assert made is not None
    assert list(made.now().failed) == [0]
    assert 2 in made.now().masks
    assert masks.begin(MaskRequest.of(step_of(SampleSpec()))) is None
    assert masks.advance([5]) is None
    strange = SequenceSampling.of(SamplingParams(response_format="regex", grammar="x"), 1, CONFIG.eos_token_ids)
    assert refused(masks, strange.at(PROMPT))


def test_without_a_tokenizer_no_format_can_be_followed(tmp_path: Path) -> None:
    masks = MaskBuilder(lambda: Tokenizer.load(tmp_path), CONFIG.vocab_size, CONFIG.eos_token_ids)
    assert "no tokenizer" in refused(masks, SampleSpec(SamplingParams(response_format="json_object")))
    masks.close()


def test_the_tokenizer_is_made_before_the_first_grammar_if_it_can_be(tmp_path: Path) -> None:
    loads = iter([Tokenizer.load])
    warm = MaskBuilder(lambda: next(loads)(FOLDER), CONFIG.vocab_size, CONFIG.eos_token_ids)
    warm.warm()
    assert not list(loads)
    made = warm.begin(MaskRequest.of(step_of(SampleSpec(SamplingParams(response_format="json_object")))))
    assert made is not None
    assert not made.now().failed, "the tokenizer is not made again"
    warm.close()
    without = MaskBuilder(lambda: Tokenizer.load(tmp_path), CONFIG.vocab_size, CONFIG.eos_token_ids)
    without.warm()
    assert "no tokenizer" in refused(without, SampleSpec(SamplingParams(response_format="json_object")))
    without.close()


def test_guesses_that_a_step_checks_have_the_masks_of_plain_steps(masks: MaskBuilder) -> None:
    """Each guess follows from the one before; behind one that does not fit there is none, and the others go on."""
    params = schema(SCHEMAS["record"], 9)
    tokens = generate(masks, params)[:9]
    sampling = SequenceSampling.of(params, len(PROMPT), CONFIG.eos_token_ids)
    first = sampling.at(array("i", [*PROMPT, *tokens[:4]]))
    specs = [first]
    for token in tokens[4:]:
        specs.append(specs[-1].after(token))
    wrong = specs[2].after(min(set(range(CONFIG.vocab_size)) - allowed(begun(masks, specs[2])[0])))
    plain = [begun(masks, spec)[0] for spec in specs]
    assert list(begun(masks, first, *specs[1:]).values()) == plain
    for order in ([first, *specs[1:3], wrong, wrong.after(0)], [first, *specs[1:]]):
        made = masks.begin(MaskRequest.of(step_of(*order)))
        assert made is not None
        given = made.now()
        good = [index for index, spec in enumerate(order) if spec in specs]
        assert [bytes(given.masks[index]) for index in good] == plain[: len(good)]
        assert set(given.failed) == set(range(len(order))) - set(good)
    assert begun(masks, specs[3])[0] == plain[3]
