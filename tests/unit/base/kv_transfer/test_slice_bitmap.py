"""The slice ledger against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import FrameError
from moonpool.base.kv.frames import SliceRun
from moonpool.base.kv_transfer.slice_bitmap import SliceBitmap
from tests.examples import examples

SMALL = settings(max_examples=examples(100), database=None)


def run(layer: int, first: int, count: int = 1, heads: tuple[int, int] = (0, 2)) -> SliceRun:
    return SliceRun(layer, first, count, *heads, 16)


def test_whole_runs() -> None:
    ledger = SliceBitmap(range(1, 3), 4, range(2), held_blocks=1)
    assert (ledger.missing(), ledger.complete) == (6, False)
    ledger.accept(run(1, 1, 3))
    assert ledger.layer_complete(1)
    assert not ledger.layer_complete(2)
    ledger.accept(run(2, 2, 2))
    assert ledger.missing() == 1
    ledger.accept(run(2, 1))
    assert ledger.complete
    ledger.check_invariants()


def test_leading_blocks_are_whole_in_every_layer() -> None:
    ledger = SliceBitmap(range(2), 4, range(2), held_blocks=1)
    assert ledger.leading == 1
    ledger.accept(run(0, 1, 3))
    assert ledger.leading == 1
    ledger.accept(run(1, 1))
    ledger.accept(run(1, 3))
    ledger.accept(run(1, 2, 1, (0, 1)))
    assert ledger.leading == 2
    ledger.accept(run(1, 2, 1, (1, 2)))
    assert ledger.leading == 4


def test_head_ranges() -> None:
    ledger = SliceBitmap(range(1), 2, range(3))
    ledger.accept(run(0, 0, 2, (0, 2)))
    assert ledger.missing() == 2
    with pytest.raises(FrameError, match="before"):
        ledger.accept(run(0, 1, 1, (1, 3)))
    with pytest.raises(FrameError, match="before"):
        ledger.accept(run(0, 1, 1, (0, 3)))
    ledger.accept(run(0, 1, 1, (2, 3)))
    assert ledger.missing() == 1
    with pytest.raises(FrameError, match="before"):
        ledger.accept(run(0, 0, 2, (2, 3)))
    ledger.check_invariants()
    ledger.accept(run(0, 0, 1, (2, 3)))
    assert ledger.complete


def test_some_heads_only() -> None:
    ledger = SliceBitmap(range(2), 2, range(2, 5))
    for heads in ((0, 2), (1, 3), (1, 5), (4, 6), (0, 6)):
        with pytest.raises(FrameError, match="not expected"):
            ledger.accept(run(0, 0, 1, heads))
    ledger.accept(run(0, 0, 2, (2, 5)))
    assert (ledger.missing(), ledger.layer_complete(0)) == (2, True)
    ledger.accept(run(1, 0, 2, (3, 5)))
    with pytest.raises(FrameError, match="before"):
        ledger.accept(run(1, 1, 1, (2, 5)))
    ledger.check_invariants()
    ledger.accept(run(1, 0, 2, (2, 3)))
    assert ledger.complete
    ledger.check_invariants()


@pytest.mark.parametrize(
    "wrong",
    [
        run(0, 1),
        run(3, 1),
        run(1, 0),
        run(1, 4),
        run(1, 3, 2),
        run(1, 1, 0),
        run(1, 1, 1, (0, 3)),
        run(1, 1, 1, (1, 1)),
    ],
)
def test_what_is_not_expected_is_refused(wrong: SliceRun) -> None:
    ledger = SliceBitmap(range(1, 3), 4, range(2), held_blocks=1)
    with pytest.raises(FrameError):
        ledger.accept(wrong)
    assert ledger.missing() == 6
    ledger.check_invariants()


def test_truncate() -> None:
    ledger = SliceBitmap(range(2), 4, range(2), held_blocks=1)
    ledger.accept(run(0, 1, 3))
    ledger.accept(run(1, 1))
    ledger.accept(run(1, 3, 1, (0, 1)))
    ledger.truncate(2)
    ledger.check_invariants()
    assert ledger.complete
    with pytest.raises(FrameError):
        ledger.accept(run(1, 2))
    with pytest.raises(ValueError, match="truncate"):
        ledger.truncate(0)


@pytest.mark.parametrize(("blocks", "missing"), [(4, 6), (1, 0)])
def test_truncate_may_keep_all_blocks_or_those_held(blocks: int, missing: int) -> None:
    ledger = SliceBitmap(range(2), 4, range(2), held_blocks=1)
    ledger.truncate(blocks)
    assert ledger.missing() == missing
    with pytest.raises(ValueError, match="truncate"):
        ledger.truncate(blocks + 1)


def test_impossible_ledgers() -> None:
    single = range(1)
    for layers, blocks, heads, held in (
        (range(0), 1, single, 0),
        (range(0, 4, 2), 1, single, 0),
        (single, 1, range(2, 2), 0),
        (single, 1, range(0, 4, 2), 0),
        (single, 1, range(-1, 1), 0),
        (single, 1, single, 2),
    ):
        with pytest.raises(ValueError, match="impossible"):
            SliceBitmap(layers, blocks, heads, held)


runs = st.builds(
    SliceRun, st.integers(0, 3), st.integers(0, 6), st.integers(0, 4), st.integers(0, 2), st.integers(1, 4), st.just(16)
)


@SMALL
@given(
    st.integers(0, 2),
    st.lists(runs, max_size=25),
    st.sampled_from([range(3), range(2), range(1, 3), range(2, 3)]),
    st.sampled_from([{}, {1: 1}, {2: 4}, {1: 6, 2: 3}]),
)
def test_agrees_with_a_set(held: int, sequence: list[SliceRun], heads: range, unsent: dict[int, int]) -> None:
    layers, blocks = range(1, 3), 6
    ledger = SliceBitmap(layers, blocks, heads, held, unsent)
    wanted = {(la, b, h) for la in layers for b in range(max(held, unsent.get(la, 0)), blocks) for h in heads}
    got: set[tuple[int, int, int]] = set()
    for item in sequence:
        cells = {
            (item.layer, b, h)
            for b in range(item.first_block, item.first_block + item.block_count)
            for h in range(item.head_begin, item.head_end)
        }
        if cells and cells <= wanted and not cells & got:
            ledger.accept(item)
            got |= cells
        else:
            with pytest.raises(FrameError):
                ledger.accept(item)
        ledger.check_invariants()
        assert ledger.missing() == len({cell[:2] for cell in wanted - got})
        assert ledger.complete == (got == wanted)
    for layer in layers:
        assert ledger.layer_complete(layer) == (not any(cell[0] == layer for cell in wanted - got))


def test_checking_records_nothing_and_refuses_what_accepting_would() -> None:
    ledger = SliceBitmap(range(2), 4, range(2), 1)
    run = SliceRun(0, 1, 2, 0, 2, 16)
    ledger.check(run)
    ledger.check(run)
    assert ledger.missing() == 6
    ledger.accept(run)
    for other in (run, SliceRun(0, 2, 2, 0, 2, 16), SliceRun(0, 0, 1, 0, 2, 16), SliceRun(2, 1, 1, 0, 2, 16)):
        with pytest.raises(FrameError):
            ledger.check(other)
    ledger.accept(SliceRun(1, 3, 1, 0, 1, 16))
    with pytest.raises(FrameError, match="a part of it"):
        ledger.check(SliceRun(1, 2, 2, 0, 2, 16))
    ledger.check_invariants()
