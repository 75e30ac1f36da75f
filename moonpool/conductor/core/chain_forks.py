"""Where chains fork: a block that many different chains follow ends a shared prefix."""

from collections import OrderedDict

from moonpool.base.scheduling.state_machine import digest_of

SHARED_BY = 4
"""A prefix that so many different chains continue is shared; fewer may be one turn asked again."""
MAX_FORKS = 1 << 14


class ChainForks:
    """Where chains fork: for each last held block the different blocks that followed, in bounded memory.

    A conversation's next turn follows the conversation's last block once. A block that many different chains follow
    ends a shared prefix, such as a system prompt, and those chains may go to different stores.
    """

    def __init__(self, max_blocks: int = MAX_FORKS) -> None:
        """Start empty; beyond `max_blocks` blocks, the least recently met are dropped."""
        if max_blocks < 1:
            raise ValueError("max_blocks must be positive")
        self._limit = max_blocks
        self._followers: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def digest(self) -> bytes:
        return digest_of(self._followers)

    def shared(self, block: bytes, follower: bytes) -> bool:
        """Note that a chain continues `block` with `follower`; return whether `block` ends a shared prefix."""
        known = self._followers.pop(block, ())
        if len(known) < SHARED_BY and follower not in known:
            known = (*known, follower)
        self._followers[block] = known
        if len(self._followers) > self._limit:
            self._followers.popitem(last=False)
        return len(known) >= SHARED_BY

    def check_invariants(self) -> None:
        """Raise AssertionError when the memory is inconsistent."""
        assert len(self._followers) <= self._limit
        for known in self._followers.values():
            assert 0 < len(set(known)) == len(known) <= SHARED_BY
