"""What I/O under way holds: blocks that must stay as they are, or are being written, until it has ended."""

from moonpool.core.kernel import Outstanding
from moonpool.frozen import frozen
from services.decode.core.actions import Action, StopReceiving
from services.decode.core.request import Member, Request, State


@frozen
class Copy:
    """A request's blocks are being swapped out or in."""

    request: Request
    out: bool
    blocks: tuple[int, ...]


@frozen
class Writing:
    """A full block is being written to one of its request's kvstores; the request may have ended."""

    request: Request
    member: Member
    index: int
    block: int
    store: int


@frozen
class Loading:
    """Blocks of a request's first member are being read from one of its kvstores."""

    request: Request
    member: Member
    held: frozenset[int]
    """What of its shape it had already."""
    first: int
    blocks: tuple[int, ...]
    store: int
    ahead: int
    """Blocks that were being loaded when it began, its own among them."""


@frozen
class Receiving:
    """What came of a request that has ended may still be being written into its blocks."""

    request: Request


Holds = Copy | Writing | Loading | Receiving


def stop_receiving(request: Request, ios: Outstanding[Holds], out: list[Action]) -> bool:
    """Whether KV of a request that ends is coming; has that stopped."""
    if request.state is not State.RECEIVING:
        return False
    out.append(StopReceiving(ios.begin(Receiving(request)), request.id))
    return True
