"""The receiver's states of a transfer."""

from __future__ import annotations

import pytest

from moonpool.base.errors import FrameError, TransferFailed
from moonpool.base.kv.frames import SliceRun
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.inbound_transfer import InboundTransfer, TransferState
from tests.layouts import GROUPED

LAYOUT = KVLayout.uniform(layers=2, kv_heads=2, head_dim=4, block_size=16, dtype="float32")


def transfer(*, blocks: list[int] | None = None, num_blocks: int = 3, held: int = 1) -> InboundTransfer:
    made = InboundTransfer(7, 2, LAYOUT, num_blocks, held, 5)
    if blocks is not None:
        made.bind(blocks)
    return made


def run(layer: int, first: int, count: int = 1, valid_tokens: int = 16) -> SliceRun:
    return SliceRun(layer, first, count, 0, 2, valid_tokens)


def test_the_whole_way() -> None:
    inbound = transfer()
    inbound.check_invariants()
    assert inbound.state is TransferState.PROMISED
    assert (inbound.matches(2), inbound.matches(1)) == (True, False)
    with pytest.raises(TransferFailed, match="promised"):
        inbound.accept(run(0, 1))
    inbound.bind([4, 9, 2])
    inbound.check_invariants()
    assert (inbound.state, inbound.blocks, inbound.missing()) == (TransferState.RECEIVING, [4, 9, 2], 4)
    inbound.accept(run(0, 1, 2, 5))
    inbound.accept(run(1, 2, 1, 5))
    assert (inbound.missing(), inbound.done) == (1, False)
    inbound.accept(run(1, 1))
    inbound.check_invariants()
    assert (inbound.state, inbound.done) == (TransferState.COMPLETE, True)
    with pytest.raises(TransferFailed, match="complete"):
        inbound.accept(run(1, 1))
    inbound.fail("too late")
    assert (inbound.state, inbound.reason) == (TransferState.COMPLETE, "")


def test_bound_only_once() -> None:
    inbound = transfer(blocks=[1, 2, 3])
    assert inbound.state is TransferState.RECEIVING
    with pytest.raises(TransferFailed, match="bound before"):
        inbound.bind([1, 2, 3])
    with pytest.raises(ValueError, match="needs 3 blocks"):
        transfer().bind([1])


def test_slices_behind_the_window_are_not_expected() -> None:
    """Of 4 blocks and 5 tokens, a window of 20 tokens needs blocks 2 to 4: the chain goes on behind block 4."""
    inbound = InboundTransfer(7, 2, GROUPED, 5, 1, 5)
    inbound.bind([4, 9, 2, 1, 3])
    for layer in (1, 3):
        with pytest.raises(FrameError, match="has come before"):
            inbound.accept(run(layer, 1, 1))
        inbound.accept(run(layer, 2, 3, 5))
    assert (inbound.missing(), inbound.leading) == (8, 1)
    inbound.accept(run(0, 1, 4, 5))
    inbound.accept(run(2, 1, 1))
    assert inbound.leading == 2
    inbound.accept(run(2, 2, 3, 5))
    inbound.check_invariants()
    assert inbound.state is TransferState.COMPLETE


def test_everything_held_is_complete_when_bound() -> None:
    inbound = transfer(num_blocks=2, held=2)
    inbound.bind([5, 6])
    inbound.check_invariants()
    assert inbound.state is TransferState.COMPLETE


@pytest.mark.parametrize(
    "wrong", [run(0, 1, 1, 15), run(0, 1, 2, 16), run(0, 2, 1, 16), run(0, 0), run(2, 1), run(0, 2, 2, 5)]
)
def test_wrong_runs_change_nothing(wrong: SliceRun) -> None:
    inbound = transfer(blocks=[4, 9, 2])
    with pytest.raises(FrameError):
        inbound.accept(wrong)
    assert (inbound.state, inbound.missing()) == (TransferState.RECEIVING, 4)
    inbound.check_invariants()


def test_a_second_coming_is_refused() -> None:
    inbound = transfer(blocks=[4, 9, 2])
    inbound.accept(run(0, 1))
    with pytest.raises(FrameError, match="before"):
        inbound.accept(run(0, 1, 2, 5))


def test_failed_is_final() -> None:
    inbound = transfer(blocks=[4, 9, 2])
    inbound.fail("lease expired")
    inbound.fail("something else")
    assert (inbound.state, inbound.reason) == (TransferState.FAILED, "lease expired")
    with pytest.raises(TransferFailed, match="lease expired"):
        inbound.accept(run(0, 1))
    promised = transfer()
    promised.fail("cancelled")
    with pytest.raises(TransferFailed, match="cancelled"):
        promised.bind([1, 2, 3])
    promised.check_invariants()


def test_of_what_could_not_be_written_nothing_is_whole() -> None:
    first = transfer(blocks=[4, 5, 6])
    for layer in range(first.layout.layers):
        first.accept(run(layer, 1))
    assert first.leading == 2
    first.distrust()
    assert first.leading == 0


def test_impossible_transfers() -> None:
    with pytest.raises(ValueError, match="impossible"):
        InboundTransfer(1, 1, LAYOUT, 0, 0, 1)
    with pytest.raises(ValueError, match="impossible"):
        InboundTransfer(1, 1, LAYOUT, 1, 0, 17)


def test_a_run_that_may_not_be_written_is_refused_before_it_comes() -> None:
    inbound = transfer(blocks=[1, 2, 3])
    inbound.check(run(0, 1))
    inbound.accept(run(0, 1))
    for wrong in (run(0, 1), run(0, 0), run(0, 1, valid_tokens=5)):
        with pytest.raises(FrameError):
            inbound.check(wrong)
    assert inbound.missing() == 3, "nothing was recorded"
