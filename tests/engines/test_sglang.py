"""Real SGLang on the CPU behind a conductor: answers of a plain forward pass, an exact index."""

from pathlib import Path

import pytest

from tests.engines.servers import SGLANG, sglang
from tests.engines.test_vllm import assert_index_is_the_cache, joined
from tests.integration.reference import Reference
from tests.unit.adapter.test_adapter import adapter
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
        await assert_index_is_the_cache(running, server, reference, 300, probes=100, instance=one)
