"""What I/O under way holds: blocks that must stay as they are, or are being written, until it has ended."""

from moonpool.frozen import frozen
from services.decode.core.request import Member, Request


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


Holds = Copy | Writing | Loading
