"""The kvstore's benchmarks: shapes, ratios, figures that are not measured, and each part once on little data."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kvstore, kvstore_peers
from benchmarks.frame import Absent, Row, Skipped, report, run
from benchmarks.kvstore_churn import Churn
from benchmarks.kvstore_client import BLOCK_SIZES, IncompleteError, Memory, chain, layout_of, parents, root_of, split
from benchmarks.kvstore_match import CHAIN_BLOCKS, build, chain_keys, percentile, record_bytes
from benchmarks.kvstore_peers import BETTER, FLOOR, TARGET, TCP, name_of, operations, rows_of, target_of
from benchmarks.kvstore_ssd import (
    LAYOUT,
    MIN_BLOCKS,
    TIMES_PUT,
    Cost,
    Figures,
    Sizes,
    blocks_bytes,
    put_in_turns,
    store,
)
from benchmarks.page import page
from tests.unit.kvstore.invariants import check

KIB = 1 << 10


def nothing(text: str) -> None:
    """Takes progress."""


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    kvstore.flags(parser)
    return parser.parse_args(flags)


# Shapes


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_blocks_have_the_size_they_are_named_after(size: int) -> None:
    assert layout_of(size).block_bytes == size


def test_a_size_that_is_not_made_of_slices_is_refused() -> None:
    for size in (0, 1, 65 * KIB):
        with pytest.raises(ValueError, match="slices of 65536 bytes"):
            layout_of(size)


def test_chains_of_different_seeds_differ_and_of_equal_ones_are_equal() -> None:
    keys = chain("a", 3)
    assert [len(key) for key in keys] == [32] * 3
    assert keys == chain("a", 3)
    assert not set(keys) & set(chain("b", 3))
    assert parents(keys, layout_of(64 * KIB)) == [root_of(layout_of(64 * KIB)), *keys[:2]]


def test_split_keeps_the_whole() -> None:
    assert split(10, 4) == [4, 4, 2]
    assert split(3, 4) == [3]


def test_memory_notices_what_is_not_what_was_put() -> None:
    memory = Memory(4 * 64 * KIB)
    assert memory.differs(4, 64 * KIB) == 4
    memory.target[:] = memory.source
    assert memory.differs(4, 64 * KIB) == 0
    memory.target[2 * 64 * KIB] ^= 1
    assert memory.differs(4, 64 * KIB) == 1
    assert len({bytes(memory.source[at : at + 64 * KIB]) for at in range(0, 4 * 64 * KIB, 64 * KIB)}) == 4


# Flags


def test_flags_name_what_they_do_not_take() -> None:
    assert options("--only", "ssd,churn", "--sizes-kib", "64,1024").only == ["ssd", "churn"]
    assert options("--sizes-kib", "64,1024").sizes_kib == [64, 1024]
    with pytest.raises(argparse.ArgumentTypeError, match=r"no such part: x; there are dram, peers"):
        kvstore.parts("x")
    with pytest.raises(argparse.ArgumentTypeError, match="not a multiple"):
        kvstore.sizes("100")


# Ratios


def test_ours_stands_beside_each_peer_and_the_better_of_them_run_by_run() -> None:
    speeds = {"moonpool": [1.0, 3.0, 2.0], "redis": [1.0, 1.0, 4.0], "mooncake": [0.5, 2.0, 1.0]}
    titles = {"moonpool": "Moonpool", "redis": "Redis", "mooncake": "Mooncake Store"}
    redis, mooncake, better = rows_of("Put", speeds, {}, titles)
    assert isinstance(redis, Row)
    assert isinstance(mooncake, Row)
    assert isinstance(better, Row)
    assert (redis.limit_name, redis.ratio, redis.target) == ("Redis", 1.0, None)
    assert (mooncake.limit_name, mooncake.ratio) == ("Mooncake Store", 2.0)
    assert (better.limit_name, better.limit_value, better.ratio) == (BETTER, 2.0, 1.0)  # beside 1, 2 and 4
    assert (better.target, better.met) == (TARGET, False)


def test_grpc_alone_is_not_a_peer() -> None:
    titles = {"redis": "Redis", FLOOR: "bare gRPC"}
    rows = rows_of("Put", {"moonpool": [1.0], "redis": [2.0], FLOOR: [4.0]}, {}, titles)
    assert [(row.limit_name, row.ratio) for row in rows if isinstance(row, Row)] == [
        ("Redis", 0.5),
        ("bare gRPC", 0.25),
        (BETTER, 0.5),
    ]


def test_each_lane_has_its_own_figures_and_target() -> None:
    speeds = {"moonpool": [3.0], TCP: [2.0], "redis": [2.0], FLOOR: [1.0]}
    rows = rows_of("Put", speeds, {}, {"redis": "Redis", FLOOR: "bare gRPC"}, own=TCP, target=target_of(TCP, 1 << 20))
    assert [(row.limit_name, row.value, row.target) for row in rows if isinstance(row, Row)] == [
        ("Redis", 2.0, None),
        ("bare gRPC", 2.0, None),
        (BETTER, 2.0, 1.0),
    ]
    assert [target_of(own, size) for own in ("moonpool", TCP, "moonpool-grpc") for size in (64 * KIB, 1 << 20)] == [
        *(TARGET, TARGET, None, 1.0, None, None)
    ]


def test_a_peer_that_is_not_installed_has_no_figure() -> None:
    titles = {"redis": "Redis", "mooncake": "Mooncake Store"}
    reason = "mooncake is not installed"
    rows = rows_of("Put", {"moonpool": [1.0], "redis": [2.0]}, {"mooncake": reason}, titles)
    assert isinstance(rows[0], Row)
    assert (rows[0].limit_name, rows[0].target) == ("Redis", None)
    assert rows[1:] == [Absent("Put", "Mooncake Store", reason), Absent("Put", BETTER, reason)]


def test_operations_stay_within_bounds() -> None:
    assert operations(64 << 20, 1 << 20, 16) == kvstore_peers.MIN_OPERATIONS
    assert operations(1 << 40, 64 * KIB, 1) == kvstore_peers.MAX_OPERATIONS
    assert operations(64 << 20, 256 * KIB, 1) == 256
    assert name_of("get", 64 * KIB, 16) == "Get, blocks of 64 KiB, 16 at a time"


def test_a_put_to_ssd_stands_beside_the_slower_of_its_two_references() -> None:
    figures = Figures()
    figures.put, figures.append, figures.put_dram = [4.0, 4.0], [2.0, 5.0], [3.0, 1.0]
    figures.get, figures.read = [Cost(1.0, 1.2)] * 2, [Cost(0.9, 0.6)] * 2
    figures.read_whole = figures.read_direct = [Cost(0.5, 0.5)] * 2
    rows = figures.rows(Sizes(read=6000, put=6000, held=600))
    assert rows[0].name.endswith(" 10 times the tier")
    gigabytes = 1200 * LAYOUT.block_bytes / 1e9  # a fifth of all is put at a time
    assert rows[0].value == pytest.approx(gigabytes / 4)
    assert rows[0].limit_value == pytest.approx((gigabytes / 3 + gigabytes / 5) / 2)
    assert rows[0].ratio == pytest.approx((1.5 / 2.0 + 1.5 / 1.2) / 2)
    assert rows[3].ratio == pytest.approx(0.9)
    assert rows[3].met
    assert rows[-1].value == pytest.approx(1.2 / gigabytes / 5)
    assert rows[-1].ratio == pytest.approx(0.5)


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 201)]
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (100.0, 198.0, 7.0)


# What is not measured


def test_a_figure_that_was_not_measured_is_named_and_has_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    row = Absent("Put", "Redis", "redis is not installed")
    assert run("x", lambda options, progress: [row], [])
    shown = capsys.readouterr().out
    assert "not measured" in shown
    assert "redis is not installed" in shown
    kept = report("x", [row], date="2026-11-20")
    assert json.loads(json.dumps(kept))["rows"] == []
    assert "- Put, beside Redis: redis is not installed" in page([kept])


def test_a_peer_that_is_missing_starts_nothing() -> None:
    class Missing:
        NAME = "Redis"

        def running(self, nbytes: int) -> Any:
            raise Skipped("it is not installed")

        def client(self, address: str, memory: Memory) -> Any:
            raise AssertionError("no store to connect to")

    said: list[str] = []
    with kvstore_peers.drivers(said.append, {"redis": Missing()}) as (found, missing, titles):
        assert (found, missing, titles) == ({}, {"redis": "it is not installed"}, {"redis": "Redis"})
    assert said == ["Redis is not measured: it is not installed"]


class ForgetfulStore:
    """Says that it holds half of each chain, and has evicted it when it is read."""

    def __init__(self, forgets: bool) -> None:
        self.layout = layout_of(64 * KIB)
        self.forgets = forgets

    async def match(self, keys: list[bytes]) -> int:
        return len(keys) // 2

    async def get(self, keys: list[bytes]) -> None:
        if self.forgets:
            raise IncompleteError

    async def put(self, keys: list[bytes]) -> None: ...


@pytest.mark.parametrize(("forgets", "moved"), [(True, 0), (False, 2)])
async def test_churn_counts_only_bytes_that_were_moved(forgets: bool, moved: int) -> None:
    clock = iter([0.0, 1.0])
    store: Any = ForgetfulStore(forgets)
    churn = Churn([store], 1, until=0.5, began=0.0, clock=lambda: next(clock))
    await churn.worker(1)
    chain_bytes = 8 << 20
    assert churn.got + churn.put == moved * chain_bytes // 2
    assert (churn.requests, churn.incomplete) == (1, int(forgets))


def test_what_an_earlier_run_read_does_not_pass_for_this_one() -> None:
    memory = Memory(2 * 64 * KIB)
    memory.target[:] = memory.source
    memory.clear_target()
    assert memory.differs(2, 64 * KIB) == 2


# Data folders


def test_a_made_data_folder_is_one_that_the_store_opens(tmp_path: Path) -> None:
    from moonpool.kvstore.ssd.tier import open_tier

    assert build(tmp_path / "data", 9) == 9 * CHAIN_BLOCKS  # two segments
    tier = open_tier([tmp_path / "data"], 1 << 40, 1 << 30)
    assert (tier.lost_blocks, tier.indexed, tier.has_housekeeping) == (0, True, False)
    assert len(tier.catalogue) == 9 * CHAIN_BLOCKS
    assert all(key in tier.catalogue for key in chain_keys(8))
    assert tier.catalogue.live.total_bytes == 9 * CHAIN_BLOCKS * record_bytes()
    check(tier)
    tier.close()


# Each part once, as small as it gets


@pytest.mark.slow
def test_the_dram_part_measures_and_checks() -> None:
    rows = kvstore.measure(options("--only", "dram", "--sizes-kib", "64", "--gigabytes", "0.001"), nothing)
    assert [row.name for row in rows][::2] == ["DRAM, Put, blocks of 64 KiB", "DRAM, Get, blocks of 64 KiB"]
    measured = [row for row in rows if isinstance(row, Row)]
    assert [row.target for row in measured] == [0.5, None, 0.5, None]
    assert all(row.value > 0 for row in measured)


@pytest.mark.slow
async def test_a_sustained_put_moves_three_times_what_its_tier_holds(tmp_path: Path) -> None:
    figures, sizes = Figures(), Sizes(0, MIN_BLOCKS, MIN_BLOCKS // TIMES_PUT)
    with store(tmp_path / "other", blocks_bytes(MIN_BLOCKS)) as other:
        await put_in_turns(1, figures, tmp_path, Memory(1 << 20), sizes, other.address, nothing)
    assert [len(each) for each in (figures.put, figures.append, figures.put_dram)] == [1, 1, 1]
    assert min(*figures.put, *figures.append, *figures.put_dram) > 0
    kept = sum(path.stat().st_size for path in (tmp_path / "put" / "segments").iterdir())
    assert 0 < TIMES_PUT * kept <= blocks_bytes(MIN_BLOCKS)


@pytest.mark.slow
def test_the_other_parts_measure(tmp_path: Path) -> None:
    flags = ("--ssd-gigabytes", "0.004", "--blocks", "40000", "--churn-s", "0.5", "--churn-megabytes", "32")
    where = ("--folder", str(tmp_path))
    rows = kvstore.measure(options("--only", "ssd,prefix,match,churn", *flags, *where), nothing)
    assert len(rows) == 14
    assert all(isinstance(row, Row) and row.value > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
