"""Seeded damages to a data folder at rest: bits, values, pages, cuts and older states of all its files.

After each damage a store starts, twice; no start fails, no wrong byte is read, and new blocks are durable at once.

    python -m tests.unit.kvstore.damages --count 10000 --seed 1
"""

import argparse
import asyncio
import collections
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb

from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.core.read_leases import LeasedBlock
from moonpool.kvstore.record_store import RecordStore
from moonpool.kvstore.ssd.database_check import DamagedDatabaseError, check_database
from moonpool.kvstore.ssd.encryption import Keyring, add_key
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.records import BadRecordError
from moonpool.v1 import kv_pb2
from tests.unit.kvstore.helpers import BLOCK, RECORD, Driven, data_of, keys_of, open_ssd
from tests.unit.kvstore.invariants import check

PAGE = 4096
CAPACITY, SEGMENT = 64 * RECORD, 6 * RECORD
OLD, NEW = keys_of(80, "old"), keys_of(3, "new")
NOW = 1000.0
Damage = Callable[[random.Random, Path, Path], str]


def make_folder(path: Path, older: Path, keyring: Keyring | None) -> None:
    """A data folder of several lives, with dropped, deleted and reclaimed blocks, and an older state of the folder."""
    for life in range(4):
        driven = Driven(open_ssd(path, CAPACITY, SEGMENT, files=FileLayer(), keyring=keyring))
        records = RecordStore([path / "records"], lambda: NOW, keyring)
        for at in range(20 * life, 20 * life + 20, 2):
            driven.flush(OLD[at : at + 2], tenant=f"tenant {at % 3}")
        driven.store.delete_keys(OLD[20 * life + 3 : 20 * life + 5])
        driven.flush()
        asyncio.run(records.take([_record(f"{life}.{number}", life) for number in range(8)]))
        asyncio.run(records.applied({f"{life}.{number}": (number, 0) for number in range(4)}))
        records.close()
        _close(driven)
        if life == 2:
            shutil.copytree(path, older)


def _record(name: str, version: int) -> kv_pb2.Record:
    value = f"value of {name} ".encode() * (200 if name.endswith("7") else 3)
    return kv_pb2.Record(kind="k", tenant="t", id=name, value=value, version=version + 1, expires_at=2 * NOW)


def _close(driven: Driven) -> None:
    assert driven.store.tiers.ssd is not None
    driven.store.tiers.ssd.close()


def flip_bits(chance: random.Random, file: Path, older: Path) -> str:
    data = bytearray(file.read_bytes() or b"\0")
    span = min(len(data), chance.choice([2 * PAGE, 64 * PAGE]))  # LMDB's meta pages and trees come first
    places = [chance.randrange(span) for _ in range(chance.choice([1, 1, 2, 8]))]
    for place in places:
        data[place] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return f"bits of bytes {places}"


def change_value(chance: random.Random, file: Path, older: Path) -> str:
    """Changes what LMDB has under a key, or another file's bytes."""
    if file.name != "data.mdb":
        return change_page(chance, file, older)
    check_database(file.parent)  # LMDB ends the process where the first damage is in its way
    with lmdb.open(str(file.parent), max_dbs=8, lock=False) as env, env.begin(write=True) as txn:
        names = [name for name, _ in txn.cursor()] if file.parent.name == "index" else [None]
        if not names:
            return "nothing: the database is empty"
        table = env.open_db(chance.choice(names), txn, create=False)
        items = [(bytes(key), bytearray(value)) for key, value in txn.cursor(table)]
        if not items:
            return "nothing: the table is empty"
        key, value = chance.choice(items)
        what = chance.choice(["byte", "byte", "byte", "cut", "longer", "deleted", "moved", "swapped"])
        if what == "deleted":
            txn.delete(key, db=table)
        elif what == "moved":
            txn.delete(key, db=table)
            place = chance.randrange(len(key))
            txn.put(key[:place] + bytes([key[place] ^ 1 << chance.randrange(8)]) + key[place + 1 :], value, db=table)
        else:
            if what == "swapped":
                value = chance.choice(items)[1]
            elif what == "cut" or not value:
                value = value[: chance.randrange(len(value) + 1)]
            elif what == "longer":
                value += chance.randbytes(chance.randrange(1, 100))
            else:
                value[chance.randrange(len(value))] ^= chance.randrange(1, 256)
            txn.put(key, bytes(value), db=table)
    return f"a value: {what}, key {key.hex()}"


def change_page(chance: random.Random, file: Path, older: Path) -> str:
    data = bytearray(file.read_bytes())
    pages = max(1, len(data) // PAGE)
    number, other = chance.randrange(pages), chance.randrange(pages)
    before = older.read_bytes() if older.exists() else bytes(PAGE)
    what = chance.choice(["zeros", "noise", "another", "older"])
    new = {
        "zeros": bytes(PAGE),
        "noise": chance.randbytes(PAGE),
        "another": data[other * PAGE : other * PAGE + PAGE],
        "older": before[number * PAGE : number * PAGE + PAGE],
    }[what]
    data[number * PAGE : number * PAGE + len(new)] = new
    file.write_bytes(data)
    return f"page {number}: {what}"


def cut(chance: random.Random, file: Path, older: Path) -> str:
    size = file.stat().st_size
    new = chance.choice([0, 1, chance.randrange(size + 1), chance.randrange(size + 1) // PAGE * PAGE, size + 5000])
    with file.open("r+b") as changed:
        changed.truncate(new)
    return f"cut from {size} to {new} bytes"


def put_older(chance: random.Random, file: Path, older: Path) -> str:
    if older.exists():
        shutil.copy(older, file)
        return "an older state"
    file.unlink()
    return "deleted"


DAMAGES: dict[str, Damage] = {
    "bits": flip_bits,
    "values": change_value,
    "pages": change_page,
    "cuts": cut,
    "older": put_older,
}


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a data folder; those with a tree as often as all segments together."""
    segments = sorted((folder / "segments").iterdir())
    yield from segments
    for name in ("index/data.mdb", "records/data.mdb"):
        yield from [folder / name] * len(segments)
    yield folder / "lock"
    (folder / "unsynced").write_text(FileLayer().boot_id())
    yield folder / "unsynced"


def damage(folder: Path, older: Path, seed: int) -> str:
    """Does one or two damages; what they were."""
    chance, done = random.Random(f"damage {seed}"), []
    for _ in range(chance.choice([1, 1, 2])):
        file = chance.choice(list(files_of(folder)))
        name = chance.choice(list(DAMAGES))
        place = file.relative_to(folder)
        try:
            done.append(f"{place}: {DAMAGES[name](chance, file, older / place)}")
        except (
            lmdb.Error,
            DamagedDatabaseError,
            FileNotFoundError,
        ) as error:  # the first damage left nothing to change
            done.append(f"{place}: {error}")
    return "; ".join(done)


def judge(folder: Path, keyring: Keyring | None) -> collections.Counter[str]:
    """Starts a store on a damaged folder twice; AssertionError where it does not do what it must."""
    seen: collections.Counter[str] = collections.Counter()
    for start in range(2):
        records = RecordStore([folder / "records"], lambda: NOW, keyring)
        kept = [*records.replicated.of("k")]
        assert all(record.value == _record(record.id, record.version - 1).value for record in kept)
        driven = Driven(open_ssd(folder, CAPACITY, SEGMENT, files=FileLayer(), keyring=keyring))
        ssd = driven.store.tiers.ssd
        assert ssd is not None
        check(driven.store)
        here = [key for key in [*OLD, *NEW] if _is_here(driven, key)]
        assert set(here) == set(ssd.catalogue)
        seen["blocks lost"] += (start == 0) * (len(OLD) - 8 - len([key for key in here if key in OLD]))
        seen["records lost"] += (start == 0) * (32 - len(kept))
        if start == 0:
            driven.flush(NEW, "new")
            assert [key for keys in driven.durable for key in keys] == NEW, "new blocks are not durable"
            asyncio.run(records.take([_record("new", 5)]))
        else:
            assert set(NEW) <= set(here), "durable blocks are lost"
            assert records.replicated.get("k", "t", "new") is not None
            assert not ssd.disks[0].committer.index.rebuilt, "the index is not whole after the first start"
        assert ssd.indexed
        records.close()
        _close(driven)
        check(ssd)
    return seen


def _is_here(driven: Driven, key: BlockKey) -> bool:
    """Reads a block; a bad one leaves the store."""
    ssd, out = driven.store.tiers.ssd, memoryview(bytearray(BLOCK))
    if ssd is None or key not in ssd.catalogue:
        return False
    reader = ssd.reader(key)
    try:
        reader.read_layers(0, out)
        assert out == data_of(key), "a wrong byte"
        return True
    except BadRecordError:
        driven.store.reads.lost(LeasedBlock(reader=reader))
        return False
    finally:
        reader.release()


class Folders:
    """A template, from which each damage gets a copy of its own; `encrypted` by keys of its own."""

    def __init__(self, path: Path, *, encrypted: bool = False) -> None:
        self.path = path
        self.template, self.older, self._keyring = path / "template", path / "older", None
        if encrypted:
            add_key(path / "keys", "tenant 1")
            self._keyring = Keyring(path / "keys")
        make_folder(self.template, self.older, self._keyring)

    def run(self, seed: int) -> tuple[str, collections.Counter[str]]:
        """What was damaged, and what was lost."""
        folder = self.path / str(seed)
        shutil.copytree(self.template, folder)
        done = damage(folder, self.older, seed)
        try:
            seen = judge(folder, self._keyring)
        except BaseException as error:
            error.add_note(f"seed {seed}: {done}; the folder is {folder}")
            raise
        shutil.rmtree(folder)
        return done, seen


def _in_child(folders: Folders, seeds: Sequence[int]) -> tuple[int, str]:
    """Runs seeds in a process of their own, which LMDB may end; how many were run, and what failed first."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write, "w", buffering=1) as out:
            for seed in seeds:
                out.write(f"{seed} ")
                out.flush()
                try:
                    folders.run(seed)
                except BaseException as error:
                    out.write(f"\n{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}")
                    out.flush()
                    os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        told, _, failure = answers.read().partition("\n")
    _, status = os.waitpid(child, 0)
    if status and not failure:
        failure = f"the process ended with status {status}, seeds {told}"
    return max(1, len(told.split())), failure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="the first seed; the others follow")
    parser.add_argument("--encrypted", action="store_true", help="damage a folder with encrypted blocks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many, with fewer damages")
    options = parser.parse_args(argv)
    begin, at, end = time.monotonic(), options.seed, options.seed + options.count
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as path:
        folders = Folders(Path(path), encrypted=options.encrypted)
        while at < end and time.monotonic() - begin < options.seconds:
            done, failure = _in_child(folders, range(at, min(at + 50, end)))
            at += done
            if failure:
                failures.append(failure)
                print("FAILED", failure, flush=True)
    seconds = time.monotonic() - begin
    print(f"{at - options.seed} damages from seed {options.seed}: {len(failures)} failed; {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
