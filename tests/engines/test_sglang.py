"""Real SGLang on the CPU behind a conductor: answers of a plain forward pass, an exact index, a pair."""

from pathlib import Path

import pytest

from tests.engines.servers import SGLANG, sglang
from tests.engines.test_vllm import ask, assert_index_is_the_cache, joined
from tests.integration.reference import Reference
from tests.unit.conductor.stack import TINY, stack
from tests.unit.interop.adapter.test_adapter import adapter, prompts

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(
        not (SGLANG / "installed.txt").exists(), reason="SGLang is not installed: `make test-engines` installs it"
    ),
]


async def test_answers_are_a_plain_forward_passes_and_the_index_is_the_engines_cache(tmp_path: Path) -> None:
    reference, prefill = Reference(TINY), "sglang-0-prefill"
    async with (
        sglang(tmp_path, blocks=64) as server,
        stack() as running,
        adapter(server.url, running.address, "sglang-0", kind="sglang"),
    ):
        await joined(running, prefill, "sglang-0-decode")
        await assert_index_is_the_cache(running, server, reference, 300, probes=100, instance=prefill)


async def test_a_pair_answers_as_a_plain_forward_pass(tmp_path: Path) -> None:
    reference = Reference(TINY)
    async with (
        sglang(tmp_path / "p", 64, "prefill") as prefill,
        sglang(tmp_path / "d", 64, "decode") as decode,
        stack() as running,
        adapter(prefill.url, running.address, "p", kind="sglang", role="prefill", kv_domain="nixl"),
        adapter(decode.url, running.address, "d", kind="sglang", role="decode", kv_domain="nixl"),
    ):
        await joined(running, "p-prefill", "d-decode")
        asked = prompts(100, running.checkpoint.config.vocab_size)
        for prompt, answer in zip(asked, await ask(running, asked), strict=True):
            reference.assert_greedy(prompt, answer)
        await running.rest()
