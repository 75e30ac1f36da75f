"""What is asked of an engine's core about its pool, and answered at once: the same for prefill and decode."""

from collections.abc import Callable

from moonpool.sched.forgetting import ForgetKV, Forgot
from moonpool.sched.lending import LendBlocks, Lent, TakeBack


class PoolCalls:
    """Asks the core.

    Args:
        post: hands it an event.
        settle: has it handle what waits.
    """

    def __init__(self, post: Callable[[ForgetKV | LendBlocks | TakeBack], None], settle: Callable[[], None]) -> None:
        self._post = post
        self._settle = settle
        self._forgot: dict[int, int] = {}
        self._lent: dict[int, tuple[int, ...]] = {}

    def answered(self, action: Forgot | Lent) -> None:
        """The core's answer."""
        if isinstance(action, Forgot):
            self._forgot[action.number] = action.blocks
        else:
            self._lent[action.number] = action.blocks

    def forget(self, event: ForgetKV) -> int:
        """Deletes KV from the pool; how many blocks."""
        self._post(event)
        self._settle()
        return self._forgot.pop(event.number)

    def lend(self, event: LendBlocks) -> tuple[int, ...]:
        """Blocks that may be read until `take_back`; none where the core has stopped."""
        self._post(event)
        self._settle()
        return self._lent.pop(event.number, ())

    def take_back(self, event: TakeBack) -> None:
        """The blocks are not read any more."""
        self._post(event)
