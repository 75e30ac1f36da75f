"""Which blocks go when room is needed.

Owns the choice among blocks in the policy's order, one after the other, each judged with those before it gone. Must not
know of budgets, accounts or how blocks are dropped.
"""

import collections
from collections.abc import Callable, Iterator

from moonpool.kv.blocks import BlockInfo, DramBlock
from services.kvstore.tenancy.protection import Protection


class Victims:
    """Blocks chosen so far.

    Args:
        order: all that may be chosen, the first to go first.
        protection: what must stay.
        tenant: for whom they go; its own blocks are not protected from it.

    Attributes:
        blocks: the choice.
        nbytes: their bytes.
    """

    def __init__(self, order: Callable[[], Iterator[DramBlock]], protection: Protection, tenant: str) -> None:
        self._order = order
        self._protection = protection
        self._tenant = tenant
        self._going: collections.Counter[str] = collections.Counter()
        self.blocks: list[DramBlock] = []
        self.nbytes = 0

    def choose(self, wanted: int, *, own_only: bool) -> int:
        """Chooses blocks until `wanted` more bytes go; returns how many bytes are still wanting.

        Args:
            wanted: bytes.
            own_only: only blocks of the tenant itself.
        """
        if wanted <= 0:
            return 0
        chosen = {block.info.key for block in self.blocks}
        for block in self._order():
            info = block.info
            if block.holds or info.key in chosen or not self._may_go(info, own_only):
                continue
            self.blocks.append(block)
            self._going[info.tenant] += info.nbytes
            self.nbytes += info.nbytes
            wanted -= info.nbytes
            if wanted <= 0:
                break
        return wanted

    def _may_go(self, info: BlockInfo, own_only: bool) -> bool:
        if info.tenant == self._tenant:
            return True
        going = self._going[info.tenant] + info.nbytes
        return not own_only and not self._protection.keeps(info.key, info.tenant, going)
