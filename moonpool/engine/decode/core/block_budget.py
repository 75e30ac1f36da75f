"""The decode pool's block budget: available, promised and expected blocks."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.decode.core.request import DecodeRequest
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.scheduler.block_table import BlockTable


class BlockBudget:
    """Counts the pool's blocks: available, promised, expected to be needed.

    Attributes:
        blocks: the pool's block manager.
        watermark: blocks that an admission leaves free beyond blocks expected to be needed.
        promised: blocks promised and not bound. A promise is always kept.
        promised_window_blocks: window blocks, alike.
        expected: blocks that requests are expected to need beyond theirs. A forecast, not a promise.
    """

    def __init__(self, blocks: BlockManager, watermark: int) -> None:
        self.blocks = blocks
        self.watermark = watermark
        self.promised = self.promised_window_blocks = 0
        self.expected = 0

    @property
    def window_blocks_available(self) -> int:
        """Window blocks that can be taken now without breaking a promise; 0 where no layer has a window."""
        return self.blocks.num_slots_available - self.promised_window_blocks

    @property
    def available(self) -> int:
        """Blocks that can be taken now without breaking a promise."""
        return self.blocks.num_available - self.promised

    @property
    def surplus(self) -> int:
        """Available blocks that no request is expected to need."""
        return self.available - self.expected - self.watermark

    def cost(self, held: list[int], new: int) -> int:
        """Decrease in `available` if these matched blocks are acquired and `new` blocks allocated."""
        return new + sum(self.blocks.is_cached(block) for block in held)

    def exclusive_blocks(self, request: DecodeRequest) -> int:
        """Return how many blocks only this request references: those that preemption frees."""
        if request.spec.width > 1:
            return sum(self.blocks.ref_count(block) == count for block, count in Counter(request.refs).items())
        table = request.blocks  # blocks shared with others are leading ones, so a bisection finds the border
        return len(table) - bisect_left(table, True, key=lambda block: self.blocks.ref_count(block) == 1)

    def promise(self, request: DecodeRequest, held: list[int], new: int, whole_from: int) -> None:
        """Acquire the cached prefix and promise `new` blocks for the remainder.

        Also promises window blocks for blocks from `whole_from` on, counted in the prompt's blocks.
        """
        [sequence] = request.sequences
        sequence.table.blocks, sequence.table.past = held, min(len(held), whole_from)
        self.blocks.acquire(held, sequence.table.past)
        request.promised = new
        self.promised += new
        if self.blocks.num_slots:
            request.promised_window_blocks = len(held) + new - max(len(held), whole_from)
            self.promised_window_blocks += request.promised_window_blocks

    def bind(self, request: DecodeRequest) -> None:
        """Turn the promise into blocks, which have no window blocks yet; cannot fail."""
        [sequence] = request.sequences
        sequence.table.blocks += self.blocks.allocate(request.promised)
        self._promise_over(request)

    def match_again(self, request: DecodeRequest, most: int) -> None:
        """Take blocks of a waiting prompt that others have computed since the promise; at most `most` in all."""
        [sequence] = request.sequences
        held = len(sequence.table.blocks)
        more = self.blocks.match(sequence.keys[:most])[held:] if not self.blocks.num_slots else []
        self.blocks.acquire(more)
        sequence.table.blocks += more
        request.promised -= len(more)
        self.promised -= len(more)

    def bind_to_receive(self, request: DecodeRequest, whole_from: int) -> None:
        """As `bind`, for blocks that the prompt's KV arrives in: blocks before `whole_from` arrive without windows."""
        [sequence] = request.sequences
        self.bind(request)
        self.blocks.pass_windows(sequence.table.blocks[sequence.table.past : whole_from])
        sequence.table.past = max(sequence.table.past, min(whole_from, len(sequence.table.blocks)))
        self.blocks.give_slots(sequence.table.blocks[whole_from:])

    def _promise_over(self, request: DecodeRequest) -> None:
        self.promised -= request.promised
        self.promised_window_blocks -= request.promised_window_blocks
        request.promised = request.promised_window_blocks = 0

    def keep_continuable(self, request: DecodeRequest, most: int, window_blocks: int) -> bool:
        """Give back matched blocks behind which the prompt cannot be continued here, and promise new blocks instead.

        Args:
            request: has only its promise and the matched blocks.
            most: most blocks behind which the prompt may be continued.
            window_blocks: full blocks that layers with a window need before a token.

        Returns:
            False, with no effect, if the pool has too few available blocks or window blocks.
        """
        [sequence] = request.sequences
        end = self.blocks.continuable(sequence.table.blocks[:most])
        given_back, past = sequence.table.blocks[end:], min(sequence.table.past, max(0, end - window_blocks))
        freed = sum(self.blocks.ref_count(block) == 1 for block in given_back)
        needed = sequence.table.blocks[past : min(end, sequence.table.past)]
        if self.available + freed < len(given_back) or self.window_blocks_available < sum(
            map(self.blocks.is_spare, needed)
        ):
            return False
        self.blocks.release(given_back, max(0, sequence.table.past - end))
        self.blocks.need_windows(needed)
        sequence.table.past = past
        del sequence.table.blocks[end:]
        request.promised += len(given_back)
        self.promised += len(given_back)
        return True

    def register_leading(self, request: DecodeRequest, leading: int) -> None:
        """Register keys for full blocks among a prompt's first `leading` blocks, after the KV has arrived."""
        [sequence] = request.sequences
        sequence.table.register(sequence.keys, range(leading), self.blocks, request.owner)

    def expect(self, request: DecodeRequest, blocks: int) -> None:
        """Set the blocks that a request is expected to need beyond the present blocks."""
        self.expected += blocks - request.expected_growth
        request.expected_growth = blocks

    def release(self, request: DecodeRequest) -> None:
        """Take all blocks and any promise from a request."""
        for sequence in request.sequences:
            sequence.table.unpin(self.blocks)
            sequence.table = BlockTable()
        self._promise_over(request)

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Assert that counts match the requests, and that promises can be kept."""
        self.blocks.check_invariants()
        assert 0 <= self.promised <= self.blocks.num_available, "a promise could not be kept"
        assert 0 <= self.promised_window_blocks <= self.blocks.num_slots_available, "a promise of window blocks, alike"
        assert self.promised == sum(request.promised for request in requests)
        assert self.promised_window_blocks == sum(request.promised_window_blocks for request in requests)
        assert self.expected == sum(request.expected_growth for request in requests)
        assert all(request.expected_growth >= 0 for request in requests)


def peak_blocks(ends: Iterable[tuple[int, int]]) -> int:
    """Return most blocks needed beyond blocks taken now, if all sequences grow alike and end as expected.

    The peaks are just before a sequence ends, as in the Past-Future scheduler (ASPLOS 2025).

    Args:
        ends: for each sequence, blocks that the sequence will still take, and blocks freed at the end.
    """
    most = freed = 0
    in_order = sorted(ends)
    for index, (growth, exclusive) in enumerate(in_order):
        most = max(most, (len(in_order) - index) * growth - freed)
        freed += exclusive
    return most


def most_blocks(settings: DecodeSettings, prompt: int, total: int, width: int) -> int:
    """Return blocks for `width` sequences, each up to `total` tokens, that share the prompt's full blocks."""
    shared = prompt // settings.block_size
    return shared + width * (settings.blocks_for(total) - shared)
