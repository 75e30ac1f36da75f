"""Services are killed, disks are corrupted, clients leave: the answer is right and everything reserved comes back."""

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import wait_at_rest
from moonpool.client import AsyncClient, Client, GenerateResult, Overloaded, Slo
from tests.integration.conftest import BLOCK, small_plan, tokens, wait_busy, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import REST_TIMEOUT_S, TRIES, CheckedStack
from tests.integration.streams import disturbed

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SCORE_TOLERANCE = 1e-4
ENGINES = ("prefill-0", "decode-0")
"""Once they are restarted, KV can only come from the kvstore."""
PATIENT = ("--set", "adopt_wait_s=60", "--set", "slow_factor=0", "--set", "decode_prompt_tokens=0")
"""A conductor on a busy machine: instances may take long to join it again, and none is left because it is slow. Prefill
computes all prompts, as the tests say which instance is lost."""


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """A default stack; each test leaves all its services running."""
    plan = with_flags(small_plan(checkpoint, tmp_path_factory.mktemp("stack")), "conductor", *PATIENT)
    with CheckedStack(plan) as running:
        yield running


@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kill -9", "SIGTERM"])
def test_kvstore_restarted_between_requests(stack: CheckedStack, reference: Reference, kill: bool) -> None:
    """What was DURABLE is a hit after the restart, also for engines that have forgotten everything."""
    prompt = tokens(6 * BLOCK + 3, "restart")
    with Client(stack.address) as client:
        first = client.generate(token_ids=prompt, sampling=GREEDY)
        wait_at_rest(stack.address, REST_TIMEOUT_S)
        durable = stack.gauge("kvstore-0", "ssd_blocks")
        stack.restart("kvstore-0", kill=kill)
        assert stack.gauge("kvstore-0", "ssd_blocks") == durable >= 6
        second = stack.ask_restarted(
            ENGINES,
            lambda: client.generate(token_ids=prompt, sampling=GREEDY),
            lambda found: found.usage.cached_tokens == 6 * BLOCK,
        )
    assert second.usage.cached_tokens == 6 * BLOCK
    assert second.placement.kvstore == "kvstore-0"
    assert second.token_ids == first.token_ids
    reference.assert_greedy(prompt, second.token_ids)


@pytest.mark.slow  # `tests/unit/kvstore/test_damages.py` damages folders in a hundred ways
def test_every_byte_of_every_segment_flipped_on_disk(stack: CheckedStack, reference: Reference) -> None:
    """The store notices and serves none of it, prefill recomputes, the answer is right."""
    prompt = tokens(6 * BLOCK, "corrupt")
    with Client(stack.address) as client:
        client.generate(token_ids=prompt, sampling=GREEDY)
        wait_at_rest(stack.address, REST_TIMEOUT_S)
        stack.services["kvstore-0"].signal(signal.SIGKILL)
        stack.services["kvstore-0"].wait(60)
        assert flip_segments(stack.plan.data_dir / "kvstore-0") > 0
        stack.restart_all(["kvstore-0", *ENGINES])
        result = client.generate(token_ids=prompt, sampling=GREEDY)
    assert result.usage.cached_tokens == 0
    reference.assert_greedy(prompt, result.token_ids)


def flip_segments(data_dir: Path) -> int:
    """Flips a bit in every byte of every segment file; returns how many bytes there are."""
    flipped = bytes(byte ^ 0x10 for byte in range(256))
    sizes = [path.write_bytes(path.read_bytes().translate(flipped)) for path in data_dir.rglob("*.seg")]
    return sum(sizes)


def test_kvstore_gone(stack: CheckedStack, reference: Reference) -> None:
    """Without a store requests are served all the same."""
    stack.services["kvstore-0"].signal(signal.SIGKILL)
    stack.services["kvstore-0"].wait(60)
    prompt = tokens(5 * BLOCK, "gone")
    with Client(stack.address) as client:
        for _ in range(2):
            result = client.generate(token_ids=prompt, sampling=GREEDY)
            reference.assert_greedy(prompt, result.token_ids)
    stack.restart("kvstore-0")


def test_client_leaves_in_prefill(stack: CheckedStack) -> None:
    """The task is cancelled while the prompt is being computed."""

    async def run() -> None:
        async with AsyncClient(stack.address) as client:
            for tried in range(TRIES):
                prompt = tokens(3600, f"leave prefill {tried}")
                task = asyncio.create_task(client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=200)))
                if await asyncio.to_thread(wait_busy, stack.address, "prefill-0", REST_TIMEOUT_S, task.done):
                    break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    wait_at_rest(stack.address, REST_TIMEOUT_S)


def test_client_leaves_in_decode(stack: CheckedStack) -> None:
    """The iteration is left after some tokens."""
    with Client(stack.address) as client:
        received = 0
        stream = client.stream(
            token_ids=tokens(50, "leave decode"), sampling=SamplingParams(max_tokens=1500, ignore_eos=True)
        )
        for event in stream:
            received += len(event.token_ids)
            if received >= 5:
                break
        stream.close()
        wait_at_rest(stack.address, REST_TIMEOUT_S)
        again = client.generate(token_ids=tokens(50, "leave decode"), sampling=GREEDY)
        assert len(again.token_ids) == 8


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two instances of each kind of engine, no kvstore; sequences hardly outlive their conductor.

    They do by less than it takes to start another one, and by enough for it to open its stream: until then a promise
    lasts no longer than that, and a prompt whose promise is over is placed anew.
    """
    plan = with_flags(small_plan(checkpoint, tmp_path_factory.mktemp("pair")), "decode", "--set", "grace_s=0.3")
    plan = with_flags(plan, "conductor", *PATIENT)
    with CheckedStack(dataclasses.replace(plan, prefill=2, decode=2, kvstore=0)) as running:
        yield running


def test_a_prefix_is_read_from_a_peer(pair: CheckedStack, reference: Reference) -> None:
    """The prefill instance that has it is lost: another one reads it from the decode instance's pool."""
    with Client(pair.address) as client:
        for tried in range(TRIES):
            prompt = tokens(6 * BLOCK + 3, f"peer {tried}")
            first = client.generate(token_ids=prompt, sampling=GREEDY)
            wait_at_rest(pair.address, REST_TIMEOUT_S)
            lost, peer = first.placement.prefill, first.placement.decode
            before = pair.gauge(peer, "peer_read_bytes_total")
            pair.services[lost].signal(signal.SIGKILL)
            pair.services[lost].wait(60)
            second = client.generate(token_ids=prompt, sampling=GREEDY)
            explained = client.explain(second.request_id)
            pair.restart(lost)
            if second.usage.cached_tokens == 6 * BLOCK:
                break
            pair.restart_all(["prefill-0", "prefill-1"])  # one has learnt that reads are slow
    assert second.usage.cached_tokens == 6 * BLOCK
    assert pair.gauge(peer, "peer_read_bytes_total") > before
    if len(second.placements) == 1:  # placed anew, it may find in its own pool what was read before
        assert second.placement.kvstore == peer
        assert [
            candidate.source for candidate in explained.candidates if candidate.instance == second.placement.prefill
        ] == [peer]
    assert second.token_ids == first.token_ids
    reference.assert_greedy(prompt, second.token_ids)


def test_decode_killed_under_four_answers(pair: CheckedStack) -> None:
    """Another one goes on behind what there is of each; all are those of the undisturbed request."""
    prompt = tokens(70, "four answers")
    sampling = SamplingParams(max_tokens=400, temperature=1.0, seed=5, n=4, ignore_eos=True)
    with Client(pair.address) as client:
        undisturbed = client.generate(token_ids=prompt, sampling=sampling)
        assert len({tuple(choice.token_ids) for choice in undisturbed.choices}) == 4
        for _ in range(TRIES):
            stream, heard, killed = client.stream(token_ids=prompt, sampling=sampling), 0, ""
            for event in stream:
                heard += len(event.token_ids)
                if heard >= 10 and not killed and stream.placement is not None:
                    killed = stream.placement.decode
                    pair.services[killed].signal(signal.SIGKILL)
            result = stream.result
            assert result is not None
            assert [choice.token_ids for choice in result.choices] == [
                choice.token_ids for choice in undisturbed.choices
            ]
            pair.restart(killed)
            wait_at_rest(pair.address, REST_TIMEOUT_S)
            if len(result.placements) >= 2:  # not whole before the kill
                assert_elsewhere(result, killed)
                break
        else:
            pytest.fail("each answer was whole before the kill")


def assert_elsewhere(result: GenerateResult, killed: str) -> None:
    """It was placed again, perhaps more than once: the first try may be quicker than the news of who is lost."""
    assert len(result.placements) >= 2
    assert result.placements[0].decode == killed != result.placement.decode


@pytest.mark.slow
@pytest.mark.parametrize("beams", [0, 3])
@pytest.mark.parametrize("grace", ["runs on", "parks"])
def test_conductor_killed_under_several_answers(request: pytest.FixtureRequest, grace: str, beams: int) -> None:
    stack: CheckedStack = request.getfixturevalue("stack" if grace == "runs on" else "pair")
    drawn = SamplingParams(max_tokens=400, temperature=1.0, seed=5, n=3, ignore_eos=True)
    sampling = SamplingParams(max_tokens=60, beam_width=beams, n=3) if beams else drawn
    prompt = tokens(90, f"several {grace} {beams}")
    before = stack.gauge("decode", "sequences_adopted_total")

    async def disturbed_one() -> GenerateResult:
        async with AsyncClient(stack.address) as client:
            running = asyncio.create_task(client.generate(token_ids=prompt, sampling=sampling))
            await asyncio.to_thread(wait_gauge, stack, "decode", "sequences_running")
            await asyncio.to_thread(stack.restart, "conductor", kill=True)
            return await running

    with Client(stack.address) as client:
        undisturbed = client.generate(token_ids=prompt, sampling=sampling)
    result = asyncio.run(disturbed_one())
    assert [each.token_ids for each in result.choices] == [each.token_ids for each in undisturbed.choices]
    # What is computed again comes from steps of other shapes, whose sums round otherwise.
    for choice, other in zip(result.choices, undisturbed.choices, strict=True):
        assert choice.score == (pytest.approx(other.score, abs=SCORE_TOLERANCE) if beams else None)
    assert (result.resumes >= 1, len(result.placements)) == (True, 1)
    assert stack.gauge("decode", "sequences_adopted_total") > before, "nothing was computed again"


def wait_gauge(stack: CheckedStack, instance: str, name: str) -> None:
    """Waits until a gauge is above 0."""
    pause = threading.Event()
    while not stack.gauge(instance, name):
        pause.wait(0.01)


@pytest.mark.parametrize("victim", [pytest.param("decode", marks=pytest.mark.slow), "prefill"])
def test_instance_killed_in_the_middle(pair: CheckedStack, reference: Reference, victim: str) -> None:
    """An instance is killed while a request runs: another takes over, no token is lost or doubled."""
    prompt, stack = tokens(70, f"killed {victim}"), pair
    with Client(stack.address) as client:
        output: list[int] = []
        killed = ""
        sampling = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
        stream = client.stream(token_ids=prompt, sampling=sampling)
        for event in stream:
            output += event.token_ids
            if len(output) >= 5 and not killed and stream.placement is not None:
                killed = stream.placement.decode if victim == "decode" else stream.placement.prefill
                stack.services[killed].signal(signal.SIGKILL)
        assert stream.result is not None
        assert stream.result.token_ids == output
        if victim == "decode":
            assert_elsewhere(stream.result, killed)
        else:
            assert len(stream.result.placements) == 1
        assert len(output) == 300
        reference.assert_greedy(prompt, output)
        stack.restart(killed)
        wait_at_rest(stack.address, REST_TIMEOUT_S)


@pytest.mark.parametrize("grace", ["runs on", pytest.param("parks", marks=pytest.mark.slow)])
def test_conductor_killed_under_streams(request: pytest.FixtureRequest, reference: Reference, grace: str) -> None:
    """Its streams are resumed at the one that takes its place; decode had gone on meanwhile, or kept what it had."""
    stack: CheckedStack = request.getfixturevalue("stack" if grace == "runs on" else "pair")
    prompts = [tokens(40 + 30 * number, f"conductor {grace} {number}") for number in range(4)]
    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for _ in range(TRIES):
        before = stack.gauge("decode", "sequences_adopted_total")
        results = asyncio.run(
            disturbed(stack.address, prompts, sampling, lambda: stack.restart("conductor", kill=True))
        )
        if all(result.resumes for result in results):  # none was whole before the kill
            break
    for prompt, result in zip(prompts, results, strict=True):
        assert (len(result.token_ids), result.resumes >= 1, len(result.placements)) == (400, True, 1)
        reference.assert_greedy(prompt, result.token_ids)
    assert stack.gauge("decode", "sequences_adopted_total") >= before + len(prompts), "none was computed again"


def test_refused_early(stack: CheckedStack) -> None:
    """A TTFT that cannot be kept is refused with the prediction, before any work."""
    with Client(stack.address) as client:
        client.generate(token_ids=tokens(40, "warm"), sampling=GREEDY)
        with pytest.raises(Overloaded) as refused:
            client.generate(token_ids=tokens(1500, "late"), sampling=GREEDY, slo=Slo(ttft_s=1e-6))
    assert refused.value.reason == "ttft_slo"
    assert refused.value.predicted_ttft_s > 1e-6
    assert refused.value.retry_after_s > 0
