"""The structure check of LMDB files: whole ones pass, and damaged ones are found before LMDB reads them."""

import random
from pathlib import Path

import pytest

from moonpool.kvstore.ssd.database_check import DamagedDatabaseError, check_database, salvage_database
from moonpool.kvstore.ssd.files import open_lmdb

PAGE = 4096


def grow(folder: Path, seed: int) -> dict[bytes, bytes]:
    """A database with branch, leaf and overflow pages, free pages and named tables; what its main table holds."""
    chance, held = random.Random(seed), dict[bytes, bytes]()
    with open_lmdb(folder, map_size=1 << 26, sync=False) as env:
        tables = [env.open_db(name) for name in (b"a", b"b")]
        for _ in range(60):
            with env.begin(write=True) as txn:
                for _ in range(chance.randrange(1, 40)):
                    value = chance.randbytes(chance.choice([0, 8, 100, 3000, 9000, 40000]))
                    txn.put(chance.randbytes(chance.choice([8, 12])), value, db=chance.choice(tables))
                    key = chance.randbytes(32)
                    txn.put(key, value)
                    held[key] = value
                for key in chance.sample(sorted(held), len(held) // 10):
                    txn.delete(key)
                    del held[key]
            check_database(folder)
    return held


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_whole_database_passes_after_each_transaction_and_gives_all_its_values(tmp_path: Path, seed: int) -> None:
    held = grow(tmp_path, seed)
    found = list(salvage_database(tmp_path))
    assert all((key, value) in found for key, value in held.items())


def test_no_database_and_an_empty_file_are_fine(tmp_path: Path) -> None:
    check_database(tmp_path)
    (tmp_path / "data.mdb").touch()
    check_database(tmp_path)


def test_what_passes_is_read_and_written_whatever_was_changed(tmp_path: Path) -> None:
    """LMDB neither ends the process nor finds damage by itself, but for values, which have their own checksums."""
    grow(tmp_path, 7)
    data, chance, found = (tmp_path / "data.mdb").read_bytes(), random.Random(7), 0
    leaves = [at for at in range(2 * PAGE, len(data), PAGE) if data[at + 10] in (1, 2) and not data[at + 11]]
    for number in range(60):
        changed = bytearray(data)
        page = chance.choice([0, PAGE, *leaves])
        changed[page + chance.randrange(200)] ^= 1 << chance.randrange(8)  # header, meta page, offsets of nodes
        (tmp_path / "data.mdb").write_bytes(changed)
        try:
            check_database(tmp_path)
        except DamagedDatabaseError:
            found += 1
            continue
        with open_lmdb(tmp_path, map_size=1 << 27, sync=False) as env, env.begin(write=True) as txn:
            for name in (None, b"a", b"b"):
                table = env.open_db(name, txn)
                assert sum(len(value) for _, value in txn.cursor(table)) > 0
                txn.put(b"new %d" % number, bytes(20_000), db=table)
    print(f"{found} of 60 were found")
    assert found > 5


def test_a_cut_is_found(tmp_path: Path) -> None:
    grow(tmp_path, 1)
    data = (tmp_path / "data.mdb").read_bytes()
    for size in (1, 100, PAGE, 2 * PAGE, 5 * PAGE + 1):
        (tmp_path / "data.mdb").write_bytes(data[:size])
        with pytest.raises(DamagedDatabaseError):
            check_database(tmp_path)
