"""Where each policy for decode sends an answer, by hand."""

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY
from moonpool.conductor.placement.policies.registry import load_decode_policy

from ..core.worlds import World, facts

KEYS = [bytes([number]) * 32 for number in range(4)]
STEP = Speeds(
    decode_base_s=0.01, decode_per_sequence_s=0.001, decode_per_context_token_s=1e-6, transfer_bytes_per_s=1e6
)
NAMES = ("decode-0", "decode-1", "decode-2")


def world(policy: str, *speeds: Speeds) -> World:
    """A prefill instance and a decode instance of each of the speeds."""
    engines = (facts(f"decode-{number}", speeds=each) for number, each in enumerate(speeds))
    return World(facts("prefill-0"), *engines, decode_policy=DECODE_POLICIES[policy])


def order(found: World, **asked: object) -> list[str]:
    return [decode.id[-1] for decode in found.plan(64, **{"answer_tokens": 101, **asked}).decodes]


def uneven(policy: str) -> World:
    """The first runs many sequences of short context, the second a few of long context, the third is slow and idle."""
    found = world(policy, STEP, STEP, Speeds(decode_base_s=0.1, transfer_bytes_per_s=1e6))
    found.report("decode-0", running=40, context_tokens=2000, free_blocks=50)
    found.report("decode-1", running=5, context_tokens=70000, free_blocks=20)
    found.report("decode-2", free_blocks=40)
    return found


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("least_time", "012"), ("fewest_sequences", "210"), ("most_memory", "021"), ("social", "102")],
)
def test_the_order_of_unlike_instances(policy: str, expected: str) -> None:
    """One token of the answer makes a step 1.064 ms longer: 40 sequences lose 4.3 s in 100 tokens, and 5 half a one."""
    assert "".join(order(uneven(policy))) == expected


def test_policies_see_what_runs_there() -> None:
    found = uneven("social")
    found.events("decode-1", KEYS[:3])
    choice = next(decode for decode in found.plan(64, keys=KEYS, answer_tokens=101).decodes if decode.id == "decode-1")
    assert (choice.there.sequences, choice.there.context_tokens) == (5, 70000)
    assert (choice.there.available_blocks, choice.there.total_blocks) == (20, 100)
    assert choice.held_blocks == 3
    assert choice.others_s == pytest.approx(5 * 100 * (0.001 + 64e-6))
    assert choice.compared_s == choice.finish_s


@pytest.mark.parametrize("policy", DECODE_POLICIES)
def test_who_lacks_memory_and_who_failed_come_last(policy: str) -> None:
    found = world(policy, STEP, STEP, STEP)
    for name, free in zip(NAMES, (90, 1, 90), strict=True):
        found.report(name, free_blocks=free)
    assert order(found, suspects={"decode-0"}) == ["2", "1", "0"]


class TestLeastTime:
    def test_among_equals_the_least_recently_chosen_is_next_however_lucky_a_measurement_was(self) -> None:
        found = world("least_time", STEP, Speeds(decode_base_s=0.009, transfer_bytes_per_s=1e6))
        chosen = []
        for _ in range(4):
            chosen.append(order(found)[0])
            found.cluster.release(found.cluster.claim_decode(f"decode-{chosen[-1]}", PlacedAnswer(64, 4)), 0.0)
        assert sorted(chosen[:2]) == sorted(chosen[2:]) == ["0", "1"]

    def test_within_noise_a_held_prompt_goes_before_less_context(self) -> None:
        found = world("least_time", STEP, STEP)
        for name, context in (("decode-0", 100), ("decode-1", 300)):
            found.report(name, running=1, context_tokens=context, free_blocks=50)
        assert order(found, keys=KEYS)[0] == "0"
        found.events("decode-1", KEYS)
        assert order(found, keys=KEYS)[0] == "1"


def test_policies_are_found_by_name_and_refused_by_name() -> None:
    assert load_decode_policy(DEFAULT_DECODE_POLICY) is DECODE_POLICIES[DEFAULT_DECODE_POLICY]
    path = "moonpool.conductor.placement.decode_policies.most_memory:MostMemory"
    assert type(load_decode_policy(path)) is type(DECODE_POLICIES["most_memory"])
    with pytest.raises(ConfigError, match="decode_policy: there is no policy 'nice'; there are fewest_sequences"):
        load_decode_policy("nice")
    with pytest.raises(ConfigError, match=r"decode_policy: 'builtins:dict' is no policy"):
        load_decode_policy("builtins:dict")
