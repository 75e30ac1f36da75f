"""What an instance decided is decided again from its journal."""

import asyncio
from pathlib import Path

from moonpool.base.runtime.journal import journal_files, rerun
from tests.unit.base.transport.fakes import LAYOUT
from tests.unit.engine.prefill.calls import begin, dismiss, promised, source, storing
from tests.unit.instances import BLOCK, decoding, prefilling, prompt, spec


async def test_the_journal_of_a_busy_instance_reruns_equal(tmp_path: Path) -> None:
    """Loads, lost blocks, shared steps, a transfer, write-back, a cancel and a drain."""
    tokens = prompt(4 * BLOCK + 3)
    async with (
        storing(tokens, frame_bytes=4 * LAYOUT.slice_bytes(0)) as (store, place),
        storing() as (_, copy),
        prefilling(journal_dir=str(tmp_path), stages=2) as prefill,
        decoding() as decode,
    ):
        store.lost_at = (1, 2)
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        stories = [await begin(prefill, sequence, target=target, source=source(place, 4), write_back=copy)]
        for number in range(5):
            others = prompt(3 * BLOCK + number, number % 3 + 1)
            stories.append(await begin(prefill, spec(f"b{number}", others, max_tokens=1), write_back=copy))
        left = await begin(prefill, spec("left", prompt(5 * BLOCK, 9), max_tokens=1))
        left.call.cancel()
        await asyncio.gather(*(story.to_the_end() for story in stories))
        dismiss(decode)
        await prefill.rest()
        prefill.service.drain()
    (file,) = journal_files(tmp_path)
    result = rerun(file, check=True)
    assert result.difference is None
    assert result.events > 50
    assert not len(result.core.state.ios)
