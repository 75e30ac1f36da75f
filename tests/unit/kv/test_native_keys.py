"""Keys of long prompts, by native code and without it."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from kernels.native.build import BuildError, compiler
from moonpool.kv import native_library
from moonpool.kv.keys import block_keys, tokens_to_bytes
from moonpool.kv.native_library import chain_keys, load_native_keys, tokens_below

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
@pytest.mark.parametrize("block_tokens", [1, 7, 8, 9, 16, 64, 247, 248, 249, 256, 512])
def test_keys_are_those_of_their_tokens(block_tokens: int) -> None:
    """Also of blocks that are more than a chunk of the hash (248 tokens)."""
    for count in (0, block_tokens - 1, block_tokens, 3 * block_tokens + 1):
        tokens = array("i", [(7 * at * at + block_tokens) % 150_000 for at in range(count)])
        assert chain_keys(PARENT, tokens_to_bytes(tokens), block_tokens) == block_keys(PARENT, tokens, block_tokens)


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
