"""A recording of a conductor is a trace that the simulator reads; of what was said it holds nothing."""

import asyncio
import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from moonpool.base.errors import ConfigError, InvalidRequest, MoonpoolError, Unavailable
from moonpool.base.kv.keys import BlockKey
from moonpool.base.sampling_params import SamplingParams
from moonpool.conductor.core.request_spec import RequestSpec, SloLimits
from moonpool.conductor.trace_recording import TraceRecording
from moonpool.conductor.valid_request import ValidRequest
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.experiments.frame import simulate
from moonpool.simulator.traces.mooncake import Trace, TraceRequest

from .fakes import BLOCK_SIZE, decode, prefill
from .resuming import Call, two
from .resuming import request as asked
from .stack import WAIT_S, stack

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
FIRST = list(range(30, 70))
KEYS = tuple(bytes([number]) * 32 for number in range(4))


def opened(number: int, at: float, keys: int = 2, rest: int = 5, tenant: str = "") -> ValidRequest:
    """A request with `keys` full blocks of the same chain, and `rest` tokens of its own."""
    tokens, key = keys * BLOCK_SIZE + rest, bytes([100 + number]) * 32
    spec = RequestSpec(number, f"r{number}", tokens, 8, key, SloLimits(), at, at + 60.0, tenant=tenant)
    prompt = array("i", range(tokens))
    return ValidRequest(spec, prompt, GREEDY, (), (), b"", tuple(map(BlockKey, KEYS[:keys])), BLOCK_SIZE)


def recorded(path: Path, *requests: ValidRequest, ends: list[tuple[int, int]]) -> list[TraceRequest]:
    recording = TraceRecording(path)
    for request in requests:
        recording.opened(request)
    for number, tokens in ends:
        recording.ended(number, tokens)
    recording.close()
    return list(Trace(path))


async def test_a_recorded_conductor_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    prompts = [FIRST, [*FIRST, *range(100, 140)], list(range(200, 216)), FIRST]
    async with stack(prefill(), decode(), record_trace=path) as s:
        for prompt in prompts:
            await s.client.generate(token_ids=prompt, sampling=GREEDY, tenant="t")
        await s.client.generate(token_ids=FIRST, sampling=GREEDY, tenant="other")
    trace = Trace(path)
    requests = list(trace)
    assert trace.block_size == BLOCK_SIZE
    assert [request.input_length for request in requests] == [40, 80, 16, 40, 40]
    assert [request.output_length for request in requests] == [8] * 5
    assert requests[0].timestamp == 0.0
    first, longer, alone, again, others = (request.hash_ids for request in requests)
    assert [len(ids) for ids in (first, longer, alone)] == [3, 5, 1]
    assert first == again
    assert first[:2] == longer[:2]
    assert first[2] != longer[2], "a block that is not full is another one than when it is"
    assert not set(alone) & {*first, *longer}
    assert not set(others) & set(first), "tenants share nothing"
    *ours, theirs = (request.tenant for request in requests)
    assert len(set(ours)) == 1
    assert theirs not in {*ours, "", "other"}

    config = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=1, decode=1, block_size=BLOCK_SIZE)
    slow = replace(config, rate=1e-4)  # one prompt is computed before the next one comes
    summary, _ = simulate(slow, requests)
    assert summary.requests == 5
    assert summary.reused_share > 0


async def test_a_sequence_that_is_taken_back_is_one_request_and_ends_once(tmp_path: Path) -> None:
    """Another conductor had it for a while; here the core knows it by another number then."""
    path, d = tmp_path / "trace.jsonl", decode(hold_at=3)
    async with two(prefill(), d, record_trace=path) as (first, second), asyncio.timeout(WAIT_S):
        lost = Call(first, asked())
        await lost.read(3)
        older, newer = (lost.resume(asked(), count=count) for count in (1, 2))
        again = Call(first, newer)
        await lost.read()
        late = Call(second, older)
        with pytest.raises(InvalidRequest):
            await late.read()
        d.go.set()
        await again.read()
        for each in (first, second):
            await each.rest()
    assert [line.output_length for line in Trace(path)] == [8]


async def test_requests_without_a_token_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with stack(prefill(before=[Unavailable("gone")]), decode(), record_trace=path, retries=0) as s:
        with pytest.raises(MoonpoolError):
            await s.client.generate(token_ids=FIRST, sampling=GREEDY)
        await asyncio.gather(*(s.client.generate(token_ids=[n] * 40, sampling=GREEDY) for n in range(20, 28)))
    assert [line.output_length for line in Trace(path)] == [8] * 8


def test_lines_are_in_order_of_arrival_whatever_ends_first(tmp_path: Path) -> None:
    found = recorded(
        tmp_path / "t",
        *(opened(1, 5.0), opened(2, 4.999), opened(3, 5.5)),
        ends=[(3, 30), (2, 20), (1, 10)],
    )
    assert [(line.timestamp, line.output_length) for line in found] == [(0.0, 10), (0.0, 20), (500.0, 30)]


def test_what_has_not_ended_does_not_keep_others_back_at_the_end(tmp_path: Path) -> None:
    found = recorded(tmp_path / "t", opened(1, 0.0), opened(2, 1.0), ends=[(2, 20), (9, 9)])
    assert [line.output_length for line in found] == [20]


def test_the_numbers_are_of_one_recording_only(tmp_path: Path) -> None:
    first, two = (recorded(tmp_path / name, opened(1, 0.0), ends=[(1, 1)]) for name in ("one", "two"))
    assert not set(first[0].hash_ids) & set(two[0].hash_ids)
    text = (tmp_path / "one").read_text()
    assert set(json.loads(text.splitlines()[1])) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert not any(key.hex() in text for key in KEYS)


def test_a_tenant_has_a_name_of_this_recording_only(tmp_path: Path) -> None:
    asked = [opened(at, float(at), tenant=tenant) for at, tenant in enumerate(("acme", "acme", "other", ""))]
    earlier, later = (recorded(tmp_path / name, *asked, ends=[(at, 1) for at in range(4)]) for name in ("one", "two"))
    first, again, other, none = (line.tenant for line in earlier)
    assert first == again != other
    assert none == ""
    assert not {first, other} & {line.tenant for line in later}
    text = (tmp_path / "one").read_text()
    assert "acme" not in text
    assert not any(blake3(name + b"acme").hexdigest(length=8) in text for name in (b"", b"tenant")), "without the key"


@pytest.mark.parametrize(("sampling", "sequences", "tokens"), [
    (SamplingParams(max_tokens=5, n=3, seed=7), 3, 5),
    (SamplingParams(max_tokens=5, beam_width=3, n=2), 3, 5),
    (GREEDY, 1, 8),
])  # fmt: skip
async def test_several_answers_are_recorded_with_their_number_and_length(
    sampling: SamplingParams, sequences: int, tokens: int, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    async with stack(prefill(), decode(), record_trace=path) as s:
        await s.client.generate(token_ids=FIRST, sampling=sampling)
    (found,) = Trace(path)
    assert (found.choices, found.output_length) == (sequences, tokens)
    assert ('"n":' in path.read_text()) == (sequences > 1)


def test_the_oldest_is_left_out_when_too_many_blocks_wait(tmp_path: Path) -> None:
    recording = TraceRecording(tmp_path / "t", max_blocks=5)
    recording.opened(opened(1, 0.0))
    recording.opened(opened(2, 1.0))
    recording.ended(1, 10)
    recording.ended(2, 20)
    recording.close()
    assert [line.output_length for line in Trace(tmp_path / "t")] == [20]
    assert recording.left_out == 1


def test_an_earlier_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorded(path, opened(1, 0.0), ends=[(1, 1)])
    recorded(path, opened(1, 0.0), ends=[(1, 2)])
    assert [next(iter(Trace(path))).output_length for path in (path, tmp_path / "trace.jsonl.old")] == [2, 1]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_trace"):
        TraceRecording(tmp_path / "missing" / "trace.jsonl")


def test_a_full_disk_ends_the_recording_only() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    recording = TraceRecording(full)
    recording.opened(opened(1, 0.0))
    recording.ended(1, 10)
    recording.close()
    assert recording.left_out == 1
