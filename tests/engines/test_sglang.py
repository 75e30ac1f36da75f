"""Real SGLang on the CPU behind a conductor: answers of a plain forward pass, an exact index."""

import random
from pathlib import Path

import pytest

from moonpool.kv.keys import block_keys
from tests.engines.servers import BLOCK_TOKENS, SGLANG, sglang
from tests.engines.test_vllm import ask, joined, promised, root_of
from tests.integration.reference import Reference
from tests.unit.adapter.test_adapter import adapter, prompts
from tests.unit.conductor.stack import TINY, stack

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(
        not (SGLANG / "installed.txt").exists(), reason="SGLang is not installed: `make test-engines` installs it"
    ),
]


async def test_answers_are_a_plain_forward_passes_and_the_index_is_the_engines_cache(tmp_path: Path) -> None:
    reference, one = Reference(TINY), "sglang-0-prefill"
    async with (
        sglang(tmp_path, blocks=64) as server,
        stack() as running,
        adapter(server.url, running.address, "sglang-0", kind="sglang"),
    ):
        await joined(running, one, "sglang-0-decode")
        asked = prompts(300, running.checkpoint.config.vocab_size)  # several times what the engine can hold
        answers = await ask(running, asked)
        for prompt, answer in zip(asked[:100], answers, strict=False):
            reference.assert_greedy(prompt, answer)
        await running.rest()
        root, index, draw = root_of(running), running.servicer.core.cluster.index, random.Random(11)
        hits = evicted = 0
        for prompt in draw.sample(asked, 100):
            held, keys = promised(running, root, prompt, one), block_keys(root, prompt, BLOCK_TOKENS)
            _, cached = await server.answer(prompt)
            assert cached == held * BLOCK_TOKENS
            hits += held
            evicted += (len(prompt) - 1) // BLOCK_TOKENS - held
            if held < len(keys):  # the events of the probe
                await running.until(lambda key=keys[held]: index.holds(one, key))  # type: ignore[misc]
        print(f"100 probes: {hits} blocks held, {evicted} evicted")
        assert min(hits, evicted) > 20
