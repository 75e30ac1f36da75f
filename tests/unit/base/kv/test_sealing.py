"""Hashes of slices that were computed here: a batch in one call, by native code and without it."""

import contextlib
import random
import subprocess
from array import array
from pathlib import Path

import pytest

from moonpool.base.kv import sealing
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.native.build import BuildError, compiler

LAYOUT = KVLayout.uniform(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="int8")
BLOCKS = 9


def test_a_batch_has_the_hashes_of_its_valid_tokens() -> None:
    """On several threads, of layers and blocks in any order; whatever lies in invalid token slots."""
    with contextlib.closing(KVPool.create(LAYOUT, BLOCKS, [(0, 1), (1, 3)])) as pool:
        drawn = random.Random(3)
        for layer in range(3):
            for block in range(BLOCKS):
                pool.slice(layer, block)[:] = drawn.randbytes(LAYOUT.slice_bytes(layer))
        part = pool.parts[1]
        batch = [(layer, block, drawn.choice([16, 16, 1, 9])) for layer in (2, 1) for block in range(0, BLOCKS, 2)]
        part.seal(batch, threads=4)
        sealed = {(layer, block): valid for layer, block, valid in batch}
        for layer in (1, 2):
            for block in range(BLOCKS):
                cleaned = bytearray(pool.slice(layer, block))
                if (layer, block) in sealed:
                    LAYOUT.zero_invalid(layer, memoryview(cleaned), sealed[layer, block])
                    assert part.hash_of(layer, block) == slice_hash(cleaned)
                else:
                    assert part.hash_of(layer, block) == 0


@pytest.mark.parametrize("threads", [1, 2, 5, 99])
@pytest.mark.parametrize("count", [1, 4, 5, 37])
def test_each_slice_is_hashed_once_whatever_the_threads(threads: int, count: int) -> None:
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    native = sealing.prepare()
    assert native is not sealing.seal_in_python
    memory, found = array("B", random.Random(1).randbytes(count * 4096)), array("Q", bytes(8 * count))
    (data, _), (hashes, _) = memory.buffer_info(), found.buffer_info()
    seals = array("Q", [n for at in range(count) for n in (data + 4096 * at, 4096, hashes + 8 * at)])
    native(seals, 1 << 30, threads)
    expected = [slice_hash(memoryview(memory)[at : at + 4096]) for at in range(0, len(memory), 4096)]
    assert found.tolist() == expected
    found[:] = array("Q", bytes(8 * count))
    sealing.seal_in_python(seals, 1 << 30, threads)
    assert found.tolist() == expected


def test_a_library_that_hashes_wrongly_is_refused(tmp_path: Path) -> None:
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    source, built = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text('extern "C" void mp_seal(void*, void*, long, int) {}')
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    with pytest.raises(BuildError, match="hashes wrongly"):
        sealing.load_native_seals(built)
