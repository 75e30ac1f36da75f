"""Prefixes of models with windows: the index promises only what a chain can be continued behind."""

import random

import pytest

from moonpool.base.kv.keys import block_keys, window_key
from moonpool.conductor.core.prefix_index import PrefixIndex

KEYS = block_keys(bytes(32), range(16 * 16), 16)


@pytest.mark.parametrize("seed", range(20))
def test_a_promise_is_the_longest_prefix_with_a_window(seed: int) -> None:
    """Instances with random blocks and windows, beside a search of all borders; what is on SSD only counts as cold."""
    rng = random.Random(seed)
    index, window = PrefixIndex(), rng.randint(1, 5)
    expected: dict[str, tuple[int, int]] = {}
    for name in ("store", "prefill", "decode"):
        index.add_instance(name, reports_ssd=name == "store")
        held = KEYS[: rng.randint(0, len(KEYS))]
        windows = {key for key in KEYS if rng.random() < 0.8}
        cold = [key for key in held if rng.random() < 0.1] if name == "store" else []
        stored = [*held, *(window_key(key) for key in windows)]
        index.apply(name, 1, stored, [], cold, snapshot_begin=True, snapshot_end=True)
        usable = max(n for n in range(len(held) + 1) if windows.issuperset(held[max(0, n - window) : n]))
        warm = next((n for n, key in enumerate(held) if key in cold), len(held))
        expected[name] = usable, min(usable, warm)
    prefixes = index.continuable(KEYS, index.match(KEYS), window)
    assert [blocks for blocks, _ in prefixes] == sorted({blocks for blocks, _ in prefixes})
    for name, (usable, warm) in expected.items():

        def blocks_of(slot: int) -> int:
            return max((blocks for blocks, mask in prefixes if mask >> slot & 1), default=0)

        assert blocks_of(index.slot(name)) == usable
        if name == "store":
            assert blocks_of(index.memory(name)) == warm
