"""A KV transfer's receiving side, without I/O: a state machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from moonpool.base.errors import FrameError, TransferFailed
from moonpool.base.kv.frames import FrameOpener, SliceRun
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.slice_bitmap import SliceBitmap


class InboundTransfer:
    """One transfer at the receiver: PROMISED -> RECEIVING -> COMPLETE, or FAILED from either of the first two.

    `blocks[i]` is the pool block that takes the sequence's block i, leading held blocks included. A transfer's blocks
    may be written only between a successful `accept` and the writing task's next wait, or by a thread between two calls
    of `writing`. The blocks belong to the transfer until the transfer is quiet. `damaged_block`: index of the block
    with a slice that did not match the hash, for the verdict.
    """

    def __init__(
        self,
        transfer_id: int,
        generation: int,
        layout: KVLayout,
        num_blocks: int,
        held_blocks: int,
        last_valid_tokens: int,
    ) -> None:
        """Promise room.

        Args:
            transfer_id: Unique at this receiver.
            generation: Tells this use of the id, or of the blocks, from others.
            layout: Arrangement of what will come.
            num_blocks: The sequence's blocks, held blocks included.
            held_blocks: Leading blocks that are here and will not be sent.
            last_valid_tokens: Valid tokens in the last block; all others are full.
        """
        if not (num_blocks >= 1 and 1 <= last_valid_tokens <= layout.block_size):
            raise ValueError(f"impossible transfer: {num_blocks} blocks, {last_valid_tokens} tokens in the last")
        self.transfer_id = transfer_id
        self.generation = generation
        self.layout = layout
        self.opener = FrameOpener(layout)
        self.num_blocks = num_blocks
        self.held_blocks = held_blocks
        self.last_valid_tokens = last_valid_tokens
        self.state = TransferState.PROMISED
        self.reason = ""
        self.damaged_block: int | None = None
        self.blocks: list[int] | None = None
        self._written = False
        self._trusted = True
        self._when_quiet: Callable[[], None] | None = None
        tokens = (num_blocks - 1) * layout.block_size + last_valid_tokens
        unsent = dict.fromkeys(layout.windowed_layers, layout.first_windowed_block(tokens))
        self._ledger = SliceBitmap(range(layout.layers), num_blocks, range(layout.head_shares), held_blocks, unsent)

    @property
    def done(self) -> bool:
        """The state is final."""
        return self.state in (TransferState.COMPLETE, TransferState.FAILED)

    def matches(self, generation: int) -> bool:
        """Whether a message with this generation belongs to this transfer."""
        return self.generation == generation

    def missing(self) -> int:
        """Number of (layer, block) slices that have not come."""
        return self._ledger.missing()

    @property
    def leading(self) -> int:
        """Leading blocks that are whole: all their slices have come and were verified, or they are held."""
        return self._ledger.leading if self._trusted else 0

    def distrust(self) -> None:
        """Note that an accepted run could not be written: recorded slices may be missing."""
        self._trusted = False

    def bind(self, blocks: Sequence[int]) -> None:
        """Name the pool blocks; slices may come from now on. Complete at once when everything is held.

        Raises:
            TransferFailed: The transfer is not PROMISED (bound before, or failed meanwhile).
        """
        if self.state is not TransferState.PROMISED:
            raise TransferFailed(f"transfer {self.transfer_id} is {self.state.value}: {self.reason or 'bound before'}")
        if len(blocks) != self.num_blocks:
            raise ValueError(f"transfer {self.transfer_id} needs {self.num_blocks} blocks, got {len(blocks)}")
        self.blocks = list(blocks)
        self.state = TransferState.COMPLETE if self._ledger.complete else TransferState.RECEIVING

    def accept(self, run: SliceRun) -> None:
        """Record an opened frame's run, before the run's bytes are written. Changes nothing if the call raises.

        Raises:
            TransferFailed: The transfer is not RECEIVING; the bytes must be dropped.
            FrameError: The run has come before, is not expected, or has another sequence's valid tokens.
        """
        self._check_tokens(run)
        self._ledger.accept(run)
        if self._ledger.complete:
            self.state = TransferState.COMPLETE

    def check(self, run: SliceRun) -> None:
        """As `accept` for a run of whole slices, without recording: the bytes may be written, and `accept` follows."""
        self._check_tokens(run)
        self._ledger.check(run)

    def _check_tokens(self, run: SliceRun) -> None:
        if self.state is not TransferState.RECEIVING:
            raise TransferFailed(
                f"transfer {self.transfer_id} is {self.state.value}: {self.reason or 'no slices wanted'}"
            )
        last = run.first_block + run.block_count == self.num_blocks
        valid_tokens = self.last_valid_tokens if last else self.layout.block_size
        if run.valid_tokens != valid_tokens:
            raise FrameError(f"{run}: the last block of the run must have {valid_tokens} valid tokens")

    def writing(self, writing: bool) -> None:
        """A thread begins to write into the blocks, or has finished; one at a time, whatever the state is by then."""
        assert writing is not self._written, "two would write"
        self._written, told = writing, self._when_quiet
        if not writing and told is not None:
            self._when_quiet = None
            told()

    def once_quiet(self, tell: Callable[[], None]) -> None:
        """The transfer ends: calls `tell`, now or later, once no write into the transfer's blocks is under way."""
        if self._written:
            self._when_quiet = tell
        else:
            tell()

    def fail(self, reason: str) -> None:
        """Give the transfer up. A final state stays: a complete transfer does not fail afterwards."""
        if not self.done:
            self.state = TransferState.FAILED
            self.reason = reason

    def check_invariants(self) -> None:
        """Assert that state and record agree."""
        self._ledger.check_invariants()
        if self.state is TransferState.PROMISED:
            assert self.blocks is None
        if self.state is TransferState.RECEIVING:
            assert self.blocks is not None
            assert not self._ledger.complete
        if self.state is TransferState.COMPLETE:
            assert self.blocks is not None
            assert self._ledger.complete


class TransferState(Enum):
    """Where a transfer stands. COMPLETE and FAILED are final."""

    PROMISED = "promised"
    """Room is promised; no blocks are bound, no slice may come."""
    RECEIVING = "receiving"
    """Blocks are bound; slices come."""
    COMPLETE = "complete"
    """Every slice has come."""
    FAILED = "failed"
    """Given up; whatever still comes is dropped."""
