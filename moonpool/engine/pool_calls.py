"""What is asked of an engine's core about its pool, and answered at once: the same for prefill and decode."""

from collections.abc import Callable

from moonpool.errors import Unavailable
from moonpool.sched.forgetting import ForgetKV, Forgot
from moonpool.sched.lending import LendBlocks, Lent, TakeBack


class PoolCalls:
    """Asks the core.

    Args:
        ask: has it handle what a peer wants, before it returns; raises what that meets.
        tell: the same for what nobody waits for: raises nothing.
    """

    def __init__(self, ask: Callable[[ForgetKV | LendBlocks], None], tell: Callable[[TakeBack], None]) -> None:
        self._ask = ask
        self._tell = tell
        self._forgot: dict[int, int] = {}
        self._lent: dict[int, tuple[int, ...]] = {}

    def answered(self, action: Forgot | Lent) -> None:
        """The core's answer."""
        if isinstance(action, Forgot):
            self._forgot[action.number] = action.blocks
        else:
            self._lent[action.number] = action.blocks

    def forget(self, event: ForgetKV) -> int:
        """Deletes KV from the pool; how many blocks.

        Raises:
            Unavailable: the core has stopped.
        """
        self._ask(event)
        if event.number not in self._forgot:
            raise Unavailable("the instance stops")
        return self._forgot.pop(event.number)

    def lend(self, event: LendBlocks) -> tuple[int, ...]:
        """Blocks that may be read until `take_back`; none where the core has stopped."""
        self._ask(event)
        return self._lent.pop(event.number, ())

    def take_back(self, event: TakeBack) -> None:
        """The blocks are not read any more."""
        self._tell(event)
