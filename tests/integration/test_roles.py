"""Instances of a real stack change their roles by command while streams run; a supervisor starts them again."""

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import Supervisor
from moonpool.client import Client
from tests.integration.conftest import small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

GREEDY = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def four(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Two prefill and two decode instances."""
    plan = small_plan(checkpoint, tmp_path_factory.mktemp("roles"))
    with CheckedStack(dataclasses.replace(plan, prefill=2, decode=2)) as stack:
        yield stack


def kinds(client: Client) -> dict[str, str]:
    return {instance.id: instance.kind for instance in client.cluster_state().instances}


@pytest.mark.slow
@pytest.mark.parametrize(("instance", "kind"), [("decode-1", "prefill"), ("prefill-0", "decode")])
def test_an_instance_comes_back_in_the_other_role(
    four: CheckedStack, reference: Reference, instance: str, kind: str
) -> None:
    """Streams that run meanwhile lose no token, and the instance keeps its name."""
    stack, pause = four, threading.Event()
    ends: list[int] = []
    supervisor = Supervisor(
        stack.services, stack.spawn_again, lambda _, status, __: ends.append(status), lambda name: None
    )
    prompts = [tokens(40 + 30 * number, f"roles {number}") for number in range(4)]
    with Client(stack.address) as client, ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(client.generate, token_ids=prompt, sampling=GREEDY) for prompt in prompts]
        client.change_role(instance, kind)
        while kinds(client).get(instance) != kind:
            supervisor.look()
            pause.wait(0.05)
        for prompt, result in zip(prompts, running, strict=True):
            reference.assert_greedy(prompt, result.result().token_ids)
        again = client.generate(token_ids=tokens(90, f"after {instance}"), sampling=GREEDY)
        assert len(again.token_ids) == 300
    assert ends == [10]
