"""Guesses from recent answers: of the same root of chains alone, within a bound, and gone with a deletion."""

import random
from array import array
from dataclasses import dataclass
from typing import Any

import pytest

from moonpool.base.kv.delete_kv import EVERY_TENANT, KVSelection
from moonpool.base.kv.keys import BlockKey, block_keys, chain_root, pack_keys
from moonpool.engine.decode.recent_answers import LAG, READ_AT_ONCE, RecentAnswers
from moonpool.engine.decode.speculation import KEPT_IN_COMMON, DraftSource, LookupDrafter, RightGuesses
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import NAMESPACE
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, Decode, decoding, prompt, spec

MANY = 4 * BLOCK
ROOT = BlockKey(chain_root(NAMESPACE, "a"))
OTHERS = {
    "tenant": ("b", chain_root(NAMESPACE, "b")),
    "salt": ("a", chain_root(NAMESPACE, "a", "s")),
    "adapter": ("a", chain_root(NAMESPACE, "a", "", bytes(32))),
}
PROMPT = list(range(1, 40))


@dataclass
class Answers:
    """Recent answers, with a clock that the test sets."""

    most_tokens: int = 1 << 12
    now: float = 0.0

    def __post_init__(self) -> None:
        self.recent = RecentAnswers(self.most_tokens, lambda: self.now)
        self.common = RightGuesses(KEPT_IN_COMMON)

    def begin(
        self, text: list[int], first: int, root: bytes = ROOT, tenant: str = "a"
    ) -> "tuple[LookupDrafter, array[int]]":
        """An answer's drafter and its tokens, which are `text` so far; the answer begins at `first`."""
        tokens = array("i", text)
        answer = self.recent.add(BlockKey(root), tenant, tokens, first)
        found = LookupDrafter(tokens, 4096, RightGuesses(KEPT_IN_COMMON), (self.recent, answer, self.common))
        found.guess(1)
        return found, tokens

    def ended(self, text: list[int], first: int, root: bytes = ROOT, tenant: str = "a") -> None:
        found, _ = self.begin(text, first, root, tenant)
        found.end()


def guessed(found: LookupDrafter, most: int) -> list[int]:
    return [token for token, _ in found.guess(most)]


def test_a_guess_is_what_followed_in_an_ended_answer() -> None:
    answers, said = Answers(), list(range(100, 160))
    answers.ended([*PROMPT, *said], len(PROMPT))
    found, tokens = answers.begin([*range(60, 99), 100, 101], 39)
    assert guessed(found, 4) == []
    tokens.append(102)
    assert guessed(found, 4) == [103, 104, 105, 106]
    assert found.source is DraftSource.ANSWERS
    tokens.extend([103, 7])
    assert guessed(found, 3) == [105, 106, 107], "as if one token had been replaced"
    tokens.extend(range(105, 158))
    assert guessed(found, 8) == [158, 159], "nothing behind the end"
    tokens.extend([158, 159, 160])
    assert guessed(found, 8) == []


def test_the_first_token_is_guessed_behind_the_same_end_of_a_prompt() -> None:
    answers = Answers()
    answers.ended([*PROMPT, 100, 101, 102], len(PROMPT))
    assert guessed(answers.begin(PROMPT, len(PROMPT))[0], 4) == [100, 101, 102]


def test_more_agreeing_tokens_go_first() -> None:
    """The last place of three tokens is not that of six."""
    answers = Answers()
    answers.ended([*PROMPT, 100, 101, 102, 103, 104, 105, 200, 201], len(PROMPT))
    answers.ended([*PROMPT, 7, 103, 104, 105, 300, 301], len(PROMPT))
    assert guessed(answers.begin([*PROMPT[:20], 9, 103, 104, 105], 20)[0], 1) == [300]
    assert guessed(answers.begin([*PROMPT[:20], 100, 101, 102, 103, 104, 105], 20)[0], 1) == [200]


def test_a_running_answer_is_found_once_it_is_ahead() -> None:
    """Samples in step find what has ended, not each other."""
    answers, said = Answers(), list(range(100, 160))
    answers.ended([*PROMPT, 70, 71], len(PROMPT))
    ahead, tokens = answers.begin(PROMPT, len(PROMPT))
    for token in said[: LAG - 1]:
        tokens.append(token)
        ahead.guess(1)
    assert guessed(answers.begin(PROMPT, len(PROMPT))[0], 3) == [70, 71]
    tokens.append(said[LAG - 1])
    ahead.guess(1)
    assert guessed(answers.begin(PROMPT, len(PROMPT))[0], 9) == said[:LAG]


@pytest.mark.parametrize("other", OTHERS)
def test_nothing_is_found_across_roots(other: str) -> None:
    answers, (tenant, root) = Answers(), OTHERS[other]
    answers.ended([*PROMPT, *range(100, 160)], len(PROMPT), root, tenant)
    text = [*PROMPT, *range(100, 130)]
    assert guessed(answers.begin(text, len(PROMPT))[0], 4) == []
    assert guessed(answers.begin(text, len(PROMPT), root, tenant)[0], 2) == [130, 131]


@pytest.mark.parametrize("other", OTHERS)
def test_nothing_is_found_across_roots_where_hashes_are_the_same(other: str) -> None:
    """A table of four rows, of which each answer writes three."""
    answers, (tenant, root) = Answers(most_tokens=1), OTHERS[other]
    text = array("i", [5] * 60)
    whose = answers.recent.add(BlockKey(root), tenant, text, 20)
    answers.recent.read(whose, 60)
    asks = answers.recent.add(ROOT, "a", text[:40], 20)
    assert answers.recent.find(asks, answers.recent.read(asks, 20), 20, 0) is None
    same = answers.recent.add(BlockKey(root), tenant, text[:40], 20)
    assert answers.recent.find(same, answers.recent.read(same, 20), 20, 0) is not None


def test_the_source_that_is_right_more_often_guesses() -> None:
    """Own text and answers go on differently behind the same tokens."""
    answers = Answers()
    answers.ended([*PROMPT, *(token for n in range(40) for token in (50, 51, 52, 400 + n))], len(PROMPT))
    own = [token for n in range(40) for token in (50, 51, 52, 600)]
    found, tokens = answers.begin([*PROMPT, *own[:8]], len(PROMPT))
    for token in own[8:]:
        tokens.append(token)
        found.guess(1)
    assert guessed(found, 4) == [50, 51, 52, 600]
    assert found.source is DraftSource.TEXT


def test_tokens_are_bounded_and_the_oldest_go_first() -> None:
    answers = Answers(most_tokens=300)
    for number in range(10):
        begin = 1000 * number
        answers.ended([*PROMPT, *range(begin, begin + 60)], len(PROMPT))
        assert answers.recent.tokens <= 300
    assert len(answers.recent) == 3
    assert guessed(answers.begin([*PROMPT, *range(9000, 9010)], len(PROMPT))[0], 1) == [9010]
    assert guessed(answers.begin([*PROMPT, *range(1000, 1010)], len(PROMPT))[0], 1) == []


def test_an_answer_longer_than_the_bound_is_not_kept() -> None:
    answers = Answers(most_tokens=100)
    answers.ended([*PROMPT, *range(1000, 1400)], len(PROMPT))
    assert (len(answers.recent), answers.recent.tokens) == (0, 0)


def test_of_a_long_answer_that_is_read_late_the_end_is_found() -> None:
    answers = Answers(most_tokens=1 << 14)
    long = list(range(1000, 1000 + 3 * READ_AT_ONCE))
    answers.ended([*PROMPT, *long], len(PROMPT))
    assert guessed(answers.begin([*PROMPT, *long[-60:-50]], len(PROMPT))[0], 1) == [long[-50]]
    assert guessed(answers.begin([*PROMPT, *long[:10]], len(PROMPT))[0], 1) == []


@pytest.mark.parametrize(
    ("selection", "everything", "ttl_s", "kept"),
    [
        (KVSelection(tenants=frozenset("a")), False, {}, ["b"]),
        (KVSelection(tenants=frozenset("c")), False, {}, ["a", "b"]),
        (KVSelection(keys=frozenset({ROOT})), False, {}, []),
        (KVSelection(), True, {}, []),
        (KVSelection(), False, {"a": 5.0}, ["b"]),
        (KVSelection(), False, {EVERY_TENANT: 5.0, "a": 50.0}, ["a"]),
        (KVSelection(), False, {EVERY_TENANT: 11.0}, ["a", "b"]),
    ],
)
def test_answers_go_with_deletions(
    selection: KVSelection, ttl_s: dict[str, float], kept: list[str], *, everything: bool
) -> None:
    """Running ones, too, which give nothing afterwards."""
    answers, roots, running = Answers(), {name: chain_root(NAMESPACE, name) for name in "ab"}, []
    for name, root in roots.items():
        answers.ended([*PROMPT, *range(100, 160)], len(PROMPT), root, name)
        running.append(answers.begin([*PROMPT, *range(200, 260)], len(PROMPT), root, name)[0])
    answers.now = 10.0
    answers.recent.delete(selection, everything=everything, ttl_s=ttl_s)
    for found in running:
        found.end()
    for begin in (100, 200):
        text = [*PROMPT, *range(begin, begin + 9)]
        wanted = [[begin + 9] if name in kept else [] for name in roots]
        assert [guessed(answers.begin(text, 39, root, name)[0], 1) for name, root in roots.items()] == wanted
    assert answers.recent.tokens == sum(60 + 32 for _ in range(2 * len(kept)))


def test_whatever_texts_there_are_a_guess_followed_its_tokens() -> None:
    """Random texts of few tokens, so hashes and grams repeat."""
    generator, answers = random.Random(46), Answers(most_tokens=500)
    for _ in range(40):
        found, tokens = answers.begin([generator.randrange(3) for _ in range(20)], 15)
        for _ in range(generator.randrange(80)):
            tokens.append(generator.randrange(3))
            assert all(token in (0, 1, 2) for token in guessed(found, 4))
        found.end()
        assert answers.recent.tokens <= 500
    assert answers.recent.tokens > 300


def own_spec(name: str, tokens: list[int], tenant: str, salt: str = "", *, transient: bool = False) -> Any:
    sequence, root = spec(name, tokens, max_tokens=MANY), chain_root(NAMESPACE, tenant, salt)
    sequence.tenant, sequence.cache_salt, sequence.transient, sequence.chain_root = tenant, salt, transient, root
    sequence.block_keys = pack_keys(block_keys(BlockKey(root), array("i", tokens), BLOCK))
    return sequence


async def answered(decode: Decode, conductor: Any, sequence: Any, tokens: list[int]) -> int:
    """Steps that the answer took; its tokens are checked."""
    answer, name, before = continuation(tokens, MANY), sequence.request_id, decode.service.executor.running.steps
    target = await reserve(decode, sequence)
    await transfer(decode, target, tokens)
    await conductor.start(name, target, answer[0])
    await conductor.until(lambda: name in conductor.reasons)
    assert conductor.tokens[name] == answer[1:]
    assert conductor.reasons[name] == kv_pb2.FINISH_REASON_LENGTH
    await decode.rest()
    return decode.service.executor.running.steps - before


@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 3}, {"run_steps": 9}])
async def test_an_answer_that_came_before_takes_few_steps(flags: dict[str, Any]) -> None:
    tokens = prompt(BLOCK + 3)
    async with decoding(speculative="suffix", **flags) as decode, conducting(decode) as conductor:
        first = await answered(decode, conductor, own_spec("1", tokens, "a"), tokens)
        again = await answered(decode, conductor, own_spec("2", tokens, "a"), tokens)
        assert again < first / 3
        running = decode.service.executor.running
        assert running.accepted[DraftSource.ANSWERS] > MANY / 2
        read = {gauge.name: gauge.value for gauge in decode.service.gauges().read()}
        total = sum(read[f'source_accepted_tokens_total{{source="{source.value}"}}'] for source in DraftSource)
        assert total == read["accepted_tokens_total"]
        checked = sum(read[f'source_draft_tokens_total{{source="{source.value}"}}'] for source in DraftSource)
        assert checked == read["draft_tokens_total"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a", "salt": "s"}, {"tenant": "a"}),
        ({"tenant": "a"}, {"tenant": "a", "salt": "s"}),
        ({"tenant": "a", "transient": True}, {"tenant": "a"}),
        ({"tenant": "a"}, {"tenant": "a", "transient": True}),
    ],
)
async def test_nothing_comes_from_others_and_from_what_is_not_kept(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    tokens = prompt(BLOCK + 3)
    async with decoding(speculative="suffix") as decode, conducting(decode) as conductor:
        await answered(decode, conductor, own_spec("1", tokens, **first), tokens)
        await answered(decode, conductor, own_spec("2", tokens, **second), tokens)
        assert decode.service.executor.running.checked[DraftSource.ANSWERS] == 0


@pytest.mark.parametrize("flags", [{"speculative": "ngram"}, {"suffix_decoding_max_cached_tokens": 0}])
async def test_no_answer_is_kept_where_none_is_wanted(flags: dict[str, Any]) -> None:
    async with decoding(**{"speculative": "suffix", **flags}) as decode:
        assert decode.service.executor.recent is None


async def test_a_deletion_reaches_the_answers() -> None:
    tokens = prompt(BLOCK + 3)
    async with decoding(speculative="suffix") as decode, conducting(decode) as conductor:
        await answered(decode, conductor, own_spec("1", tokens, "a"), tokens)
        recent = decode.service.executor.recent
        assert recent is not None
        assert len(recent) == 1
        deletion = kv_pb2.Deletion(id="d", selection=kv_pb2.Selection(tenants=["a"]))
        await decode.stub.Forget(kv_pb2.ForgetRequest(deletions=[deletion]))
        assert len(recent) == 0
