"""Instances of a real stack change their roles in place while streams run: process, engine, weights and pool stay."""

import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client, GenerateResult
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import SEED, small_plan, tokens, with_flags
from tests.integration.reference import GAP_TOLERANCE, Reference
from tests.integration.stack import CheckedStack

GREEDY = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
FORTY, SHORT = (dataclasses.replace(GREEDY, max_tokens=count) for count in (40, 12))
OTHER = {"prefill": "decode", "decode": "prefill"}
LOOK_S = 0.02
POOL = "memfd:moonpool-kv"
CHANGES = 6
"""Changes of a storm."""


@pytest.fixture(scope="module")
def four(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two prefill and two decode instances."""
    plan = small_plan(checkpoint, tmp_path_factory.mktemp("roles"))
    with CheckedStack(dataclasses.replace(plan, prefill=2, decode=2)) as stack:
        yield stack


def kinds(client: Client) -> dict[str, str]:
    """The engines' roles by id."""
    return {instance.id: instance.kind for instance in client.cluster_state().instances if instance.kind in OTHER}


def change_role(client: Client, instance: str, kind: str) -> float:
    """Order a change; returns the seconds until the instance has joined in the other role."""
    began, pause = time.monotonic(), threading.Event()
    client.change_role(instance, kind)
    while kinds(client).get(instance) != kind:
        pause.wait(LOOK_S)
        assert time.monotonic() - began < 60.0, f"{instance} does not become {kind}"
    return time.monotonic() - began


def processes(stack: CheckedStack, instance: str) -> tuple[int, list[str], set[str]]:
    """Process, engine processes, and the pool's memory of an instance."""
    pid = stack.services[instance].pid
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pid, workers, {line.split()[4] for line in lines_of(pid) if POOL in line} & _of_engine(workers)


def _of_engine(workers: list[str]) -> set[str]:
    return {line.split()[4] for worker in workers for line in lines_of(worker) if POOL in line}


def lines_of(pid: int | str) -> list[str]:
    """What a process has mapped; the fifth word is the file's number."""
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("instance", "kind"), [("decode-1", "prefill"), ("prefill-0", "decode")])
def test_an_instance_goes_on_in_the_other_role(
    four: CheckedStack, reference: Reference, instance: str, kind: str
) -> None:
    """Streams that run meanwhile lose no token; the instance keeps name, processes, and the pool's memory."""
    before = processes(four, instance)
    assert before[1], "no engine process"
    assert before[2], "no shared memory"
    prompts = [tokens(40 + 30 * number, f"roles {number}") for number in range(4)]
    with Client(four.address) as client, ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(client.generate, token_ids=prompt, sampling=GREEDY) for prompt in prompts]
        seconds = change_role(client, instance, kind)
        for prompt, result in zip(prompts, running, strict=True):
            reference.assert_greedy(prompt, result.result().token_ids)
        began, prompt = time.monotonic(), tokens(90, f"after {instance}")
        reference.assert_greedy(prompt, client.generate(token_ids=prompt, sampling=SHORT).token_ids)
        print(f"{instance}: changed in {seconds:.2f} s, next request in {time.monotonic() - began:.2f} s")
    assert processes(four, instance) == before
    assert "role changed" in four.services[instance].log_path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "block"), [("tiny-llama", 16), ("tiny-gemma3", 16), ("tiny-qwen3-next", 64)])
def test_cached_kv_is_found_in_the_other_role(shape: str, block: int, tmp_path: Path) -> None:
    """A decode instance has the KV of its answers, and so has the prefill instance that it becomes.

    With all layers' KV, windows, and recurrent states.
    """
    model = create(shape, tmp_path / "model", seed=SEED, dtype="float32")
    reference = Reference(model)
    plan = with_flags(small_plan(model, tmp_path), "conductor", "--set", "decode_prompt_tokens=0")
    plan = dataclasses.replace(plan, prefill=1, decode=2, kvstore=0, block_size=block)
    with (
        CheckedStack(dataclasses.replace(plan, kv_cache_memory_bytes=64 << 20)) as stack,
        Client(stack.address) as client,
    ):
        prompt = tokens(200, "kept")
        first = client.generate(token_ids=prompt, sampling=GREEDY)
        reference.assert_greedy(prompt, first.token_ids, GAP_TOLERANCE)
        decode, held = first.placement.decode, (200 + 299) // block
        other = next(name for name, kind in kinds(client).items() if kind == "decode" and name != decode)
        change_role(client, decode, "prefill")
        stack.services["prefill-0"].signal(signal.SIGTERM)  # so that only the changed one computes prompts
        assert stack.services["prefill-0"].wait(60.0) == 0
        assert stack.gauge(decode, "blocks_cached") >= held
        longer = [*prompt, *first.token_ids, *tokens(20, "more")]
        answer = client.generate(token_ids=longer, sampling=SHORT)
        reference.assert_greedy(longer, answer.token_ids, GAP_TOLERANCE)
        assert (answer.placement.prefill, answer.placement.decode) == (decode, other)
        assert answer.usage.cached_tokens >= held * block


@pytest.mark.slow
def test_a_storm_of_changes_loses_no_token(four: CheckedStack, reference: Reference) -> None:
    """Whichever instance changes, and however often, with requests in flight all the time."""
    drawn, stop = random.Random("storm of roles"), threading.Event()
    answers: list[tuple[list[int], GenerateResult]] = []

    def ask(number: int) -> None:
        for turn in range(1000):
            if stop.is_set():
                return
            prompt = tokens(20 + 35 * number, f"storm {number} {turn % 3}")
            answers.append((prompt, client.generate(token_ids=prompt, sampling=FORTY)))

    before = {name: processes(four, name) for name, service in four.services.items() if service.kind in OTHER}
    with Client(four.address) as client, ThreadPoolExecutor(4) as pool:
        asking: list[Future[None]] = [pool.submit(ask, number) for number in range(4)]
        try:
            for _ in range(CHANGES):
                now = kinds(client)
                movable = [name for name in now if list(now.values()).count(now[name]) > 1]
                name = drawn.choice(sorted(movable))
                change_role(client, name, OTHER[now[name]])
        finally:
            stop.set()
        for client_thread in asking:
            client_thread.result()
    assert len(answers) > CHANGES
    for prompt, answer in answers:
        assert len(answer.token_ids) == 40
        reference.assert_greedy(prompt, answer.token_ids)
    assert {name: processes(four, name) for name in before} == before
    four.check_at_rest()


def test_a_stack_with_one_instance_of_each_kind_changes_no_role(checkpoint: Path, tmp_path: Path) -> None:
    """The last one of a kind stays; so its engines are not set up for both roles."""
    with CheckedStack(small_plan(checkpoint, tmp_path)) as stack, Client(stack.address) as client:
        with pytest.raises(InvalidRequest, match="without either_role"):
            client.change_role("decode-0", "prefill")
        assert os.path.exists(f"/proc/{stack.services['decode-0'].pid}")
