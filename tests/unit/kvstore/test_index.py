from pathlib import Path

import pytest

from services.kvstore.index import Index, IndexChange, IndexLostError, Location, remove_index
from tests.unit.kvstore.helpers import FORMAT, keys_of

KEYS = keys_of(200)


def made(path: Path) -> Index:
    index = Index(path, 1 << 16)
    index.finish_rebuild()
    return index


def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    places = {key: Location(1, n * 8192, 8192, 7).pack() for n, key in enumerate(KEYS[:3])}
    index.commit(IndexChange(blocks=places, segments={1: 24576, 300: 5}, formats={7: FORMAT}))
    index.commit(IndexChange(removed_blocks=[KEYS[0], KEYS[9]], removed_segments=[300]))
    index.close()
    index = Index(tmp_path / "i")
    image = index.load()
    assert image.blocks == {key: places[key] for key in KEYS[1:3]}
    assert image.segments == {1: 24576}
    assert image.formats == {7: FORMAT}
    assert Location.unpack(image.blocks[KEYS[1]]) == Location(1, 8192, 8192, 7)
    index.close()


def test_the_map_grows(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    for n in range(20):
        keys = keys_of(200, chain=str(n))
        index.commit(IndexChange(blocks={key: Location(n, 0, 0, 0).pack() for key in keys}))
    assert len(index.load().blocks) == 4000
    index.close()


def test_an_unfinished_index_is_lost(tmp_path: Path) -> None:
    index = Index(tmp_path / "i")
    index.commit(IndexChange(segments={1: 1}))
    with pytest.raises(IndexLostError, match="new"):
        index.load()
    index.close()
    remove_index(tmp_path / "i")
    remove_index(tmp_path / "i")


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty"])
def test_a_damaged_file_is_lost_and_never_touched_further(tmp_path: Path, damage: str) -> None:
    index = made(tmp_path / "i")
    for n in range(20):
        index.commit(IndexChange(blocks={key: Location(n, 0, 0, 0).pack() for key in keys_of(200, chain=str(n))}))
    index.close()
    data = tmp_path / "i" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes({"garbage": b"\xa5" * len(whole), "cut": whole[: len(whole) // 2], "empty": b"x"}[damage])
    with pytest.raises(IndexLostError):
        Index(tmp_path / "i").load()
