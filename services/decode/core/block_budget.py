"""The block budget of the decode pool: free, promised and expected blocks, and blocks pinned by pending I/O."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from moonpool.frozen import frozen
from moonpool.scheduling.block_manager import BlockManager, DeleteKV, KVDeleted, delete_kv
from moonpool.scheduling.state_machine import PendingIo
from services.decode.core.actions import Action, StopReceiving
from services.decode.core.request import DecodeRequest, RequestSequence, RequestStatus


def peak_blocks(lives: Iterable[tuple[int, int]]) -> int:
    """Blocks that are needed beyond those taken now at the worst moment, if all grow alike and end as expected.

    The worst moments are those before a sequence ends, as in the Past-Future scheduler (ASPLOS 2025).

    Args:
        lives: of each sequence the blocks that it will still take, and those that come free with its end.
    """
    most = freed = 0
    ends = sorted(lives)
    for index, (claim, frees) in enumerate(ends):
        most = max(most, (len(ends) - index) * claim - freed)
        freed += frees
    return most


class BlockBudget:
    """Counts over the pool's blocks.

    Args:
        blocks: of the pool.
        watermark: blocks that an admission leaves free beyond what is expected to be needed.
    """

    def __init__(self, blocks: BlockManager, watermark: int) -> None:
        self.blocks = blocks
        self.watermark = watermark
        self.promised = 0
        """Blocks promised and not bound. A promise is kept whatever happens."""
        self.claims = 0
        """Sum of the requests' claims: blocks expected to be needed. No more than an expectation."""

    @property
    def spare(self) -> int:
        """Blocks that can be taken now without breaking a promise."""
        return self.blocks.num_available - self.promised

    @property
    def unexpected(self) -> int:
        """Blocks that are not expected to be needed here."""
        return self.spare - self.claims - self.watermark

    def cost(self, held: list[int], new: int) -> int:
        """Blocks by which `spare` falls when blocks that were matched are acquired and others taken."""
        return new + sum(self.blocks.is_cached(block) for block in held)

    def frees(self, request: DecodeRequest) -> int:
        """Blocks that nobody but a request refers to. Others share leading ones only."""
        if request.width > 1:
            return sum(self.blocks.ref_count(block) == count for block, count in Counter(request.refs).items())
        table = request.blocks
        return len(table) - bisect_left(table, True, key=lambda block: self.blocks.ref_count(block) == 1)

    def promise(self, request: DecodeRequest, held: list[int], new: int) -> None:
        """Acquires the held prefix and promises blocks behind it."""
        self.blocks.acquire(held)
        [member] = request.members
        member.table = held
        request.promised = new
        self.promised += new

    def bind(self, request: DecodeRequest) -> None:
        """Turns the promise into blocks; cannot fail."""
        [member] = request.members
        self.promised -= request.promised
        member.table += self.blocks.allocate(request.promised)
        request.promised = 0

    def keep(self, request: DecodeRequest, leading: int) -> None:
        """So many leading blocks of a prompt are there: the full ones can be found by their keys."""
        [member] = request.members
        for block, key in zip(member.table[:leading], member.keys, strict=False):
            self.blocks.register(block, key, request.owner)

    def claim(self, request: DecodeRequest, blocks: int) -> None:
        """Changes what a request is expected to need beyond what it has."""
        self.claims += blocks - request.claim
        request.claim = blocks

    def give_back(self, request: DecodeRequest) -> None:
        """Takes all blocks and any promise from a request."""
        for member in request.members:
            self.blocks.release(member.table)
            member.table = []
        self.promised -= request.promised
        request.promised = 0

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Asserts that the counts are those of the requests, and that promises can be kept."""
        self.blocks.check_invariants()
        assert 0 <= self.promised <= self.blocks.num_available, "a promise could not be kept"
        assert self.promised == sum(request.promised for request in requests)
        assert self.claims == sum(request.claim for request in requests)
        assert all(request.claim >= 0 for request in requests)


@frozen
class SwapPin:
    """A request's blocks are being swapped out or in."""

    request: DecodeRequest
    out: bool
    blocks: tuple[int, ...]


@frozen
class StorePin:
    """A full block is being written to one of its request's kvstores; the request may have ended."""

    request: DecodeRequest
    member: RequestSequence
    index: int
    block: int
    store: int


@frozen
class LoadPin:
    """Blocks of a request's first member are being read from one of its kvstores."""

    request: DecodeRequest
    member: RequestSequence
    held: frozenset[int]
    """What of its shape it had already."""
    first: int
    blocks: tuple[int, ...]
    store: int
    ahead: int
    """Blocks that were being loaded when it began, its own among them."""


@frozen
class ReceivePin:
    """What came of a request that has ended may still be being written into its blocks."""

    request: DecodeRequest


BlockPin = SwapPin | StorePin | LoadPin | ReceivePin


def stop_receiving(request: DecodeRequest, ios: PendingIo[BlockPin], out: list[Action]) -> bool:
    """Whether KV of a request that ends is coming; has that stopped."""
    if request.state is not RequestStatus.RECEIVING:
        return False
    out.append(StopReceiving(ios.begin(ReceivePin(request)), request.id))
    return True


def delete_request_kv(blocks: BlockManager, event: DeleteKV, requests: Sequence[DecodeRequest]) -> KVDeleted:
    """Deletes; of all `requests` that concern it nothing is kept from now on, nor looked for in kvstores."""
    keys = ((it.owner, [key for member in it.members for key in member.keys]) for it in requests)
    forgot = delete_kv(blocks, event, keys)
    for request in requests:
        if request.owner.transient:
            request.keep_nothing()
    return forgot
