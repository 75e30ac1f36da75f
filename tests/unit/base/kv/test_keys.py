"""Block keys and slice hashes, in Python and in native code."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import pytest
from blake3 import blake3

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv import native_library
from moonpool.base.kv.keys import (
    block_keys,
    chain_root,
    namespace,
    pack_keys,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack_keys,
)
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.native_library import chain_keys, load_native_keys, tokens_below
from moonpool.base.native.build import BuildError, compiler
from tests.layouts import uniform_like

LAYOUT = KVLayout.uniform(layers=2, kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
FINGERPRINT = bytes(range(32))
TOKENS = [0, 1, -1, 2**31 - 1, -(2**31), *range(100, 143)]


def test_golden_vectors() -> None:
    space = namespace(FINGERPRINT, LAYOUT)
    assert space.hex() == "6b0df4ff3cce7d5e31f7e6c975228f1099076c68c0a90448cc2f35482efb0363"
    root = chain_root(space, "")
    assert root.hex() == "902d93e94e92a3cb92feff3bc017a458dc1a3e266dbb92c5956884072da98086"
    assert chain_root(space, "tenant-1").hex() == "0de4b896c8bc4d5ba85c42e8c8e2752a8e8c611e653db3349a6668286d01c9f5"
    assert chain_root(space, "", "salt").hex() == "75c2c5ac59e8e965b697ffe4f1e576a375cefb6f960f780b8bd758c265ad1990"
    lora = chain_root(space, "", "", bytes(range(32)))
    assert lora.hex() == "58251b68e0a8a0ec6f9cc6f4abb56a6607dfe76f68367ef98a02466ac7d57943"
    assert [key.hex() for key in block_keys(root, TOKENS, 16)] == [
        "27a2100b36da51ad1ba30b58b77bbe66457e115d1f308dcf2922ab66b9c9f68d",
        "c40af8aa3f051d7fa1fe658fac4fa56ecde91e00e82d44804b8b9b03fd7acf24",
        "653b446b6a719b0bc30924cd260fa514c87f8a1328e2ac2a0fc48bb6e581c301",
    ]


def test_a_key_is_blake3_of_parent_and_little_endian_tokens() -> None:
    parent = bytes(32)
    (key,) = block_keys(parent, TOKENS[:16], 16)
    assert key == blake3(parent + struct.pack("<16i", *TOKENS[:16])).digest()


def test_chains_extend_from_any_block() -> None:
    root = chain_root(namespace(FINGERPRINT, LAYOUT), "")
    keys = block_keys(root, TOKENS, 16)
    assert keys[:1] + block_keys(keys[0], TOKENS[16:], 16) == keys
    assert block_keys(root, array("i", TOKENS), 16) == keys


def test_only_full_blocks_have_keys() -> None:
    assert [len(block_keys(bytes(32), [1] * tokens, 16)) for tokens in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]


def test_everything_that_matters_changes_the_namespace() -> None:
    spaces = {namespace(FINGERPRINT, LAYOUT), namespace(FINGERPRINT[::-1], LAYOUT)}
    for change in (
        {"layers": 3},
        {"kv_heads": 1},
        {"head_dim": 4},
        {"block_size": 32},
        {"dtype": "float16"},
        {"dtype": "int8"},
    ):
        spaces.add(namespace(FINGERPRINT, uniform_like(LAYOUT, **change)))
    assert len(spaces) == 8
    assert all(len(space) == 32 for space in spaces)


def test_tenants_salts_and_adapters_share_no_key() -> None:
    space = namespace(FINGERPRINT, LAYOUT)
    owners = [("", ""), ("a", ""), ("b", ""), ("a", "b"), ("b", "a"), ("", "a"), ("ab", "")]
    roots = [chain_root(space, *owner, lora) for owner in owners for lora in (b"", b"a", b"b")]
    keys = [key for root in roots for key in block_keys(root, TOKENS, 16)]
    assert len(set(keys)) == len(keys)


def test_packing() -> None:
    keys = block_keys(bytes(32), TOKENS, 16)
    assert unpack_keys(pack_keys(keys)) == keys
    assert unpack_keys(b"") == []
    with pytest.raises(InvalidRequest) as caught:
        unpack_keys(b"x" * 33, "parent_keys")
    assert caught.value.field == "parent_keys"


def test_tokens() -> None:
    data = tokens_to_bytes(TOKENS)
    assert data == struct.pack(f"<{len(TOKENS)}i", *TOKENS)
    assert tokens_to_bytes(array("q", TOKENS)) == data
    assert list(tokens_from_bytes(data)) == TOKENS
    assert tokens_from_bytes(data).typecode == "i"
    with pytest.raises(InvalidRequest) as caught:
        tokens_from_bytes(data[:-1], "history")
    assert caught.value.field == "history"
    for wrong in ([2**31], [1.5], ["a"]):
        with pytest.raises(InvalidRequest):
            tokens_to_bytes(wrong)  # type: ignore[arg-type]


def test_no_more_keys_than_are_wanted() -> None:
    assert len(unpack_keys(bytes(64), max_keys=2)) == 2
    with pytest.raises(InvalidRequest, match="stored_keys: at most 2 keys, not 3"):
        unpack_keys(bytes(96), "stored_keys", max_keys=2)


PARENT = bytes(range(100, 132))


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's native code; skips where there is no compiler. Or none."""
    if request.param == "python":
        monkeypatch.setattr(native_library, "prepare", lambda: None)
        return
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    assert native_library.prepare() is not None


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("block_size", [1, 7, 8, 9, 16, 64, 247, 248, 249, 256, 512])
def test_keys_are_those_of_their_tokens(block_size: int) -> None:
    """Also of blocks that are more than a chunk of the hash (248 tokens)."""
    for count in (0, block_size - 1, block_size, 3 * block_size + 1):
        tokens = array("i", [(7 * at * at + block_size) % 150_000 for at in range(count)])
        assert chain_keys(PARENT, tokens_to_bytes(tokens), block_size) == block_keys(PARENT, tokens, block_size)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("token", [-1, 150_000, -(2**31), 2**31 - 1])
def test_tokens_that_the_model_lacks_are_found_wherever_they_are(token: int) -> None:
    known = array("i", [0, 149_999] * 40)
    assert tokens_below(tokens_to_bytes(known), 150_000)
    for at in (0, 41, 79):
        tokens = known[:]
        tokens[at] = token
        assert not tokens_below(tokens_to_bytes(tokens), 150_000)


def test_what_is_no_library_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "it.so"
    path.write_text("no library")
    with pytest.raises(OSError, match="too short"):
        load_native_keys(path)
