"""I/O in flight, with the blocks that each pins."""

from moonpool.base.frozen import frozen
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence


@frozen
class SwapPin:
    """Pins a request's blocks while they are swapped out or in."""

    request: DecodeRequest
    out: bool
    blocks: tuple[int, ...]


@frozen
class StorePin:
    """Pins a full block while the block is written to one of the request's kvstores; the request may have ended.

    Attributes:
        windowed: the slices of layers with a window are written, too.
    """

    request: DecodeRequest
    sequence: RequestSequence
    index: int
    block: int
    store: int
    windowed: bool


@frozen
class ReceivePin:
    """Pins an ended request's blocks while a transfer may still write into these blocks."""

    request: DecodeRequest


BlockPin = SwapPin | StorePin | ReceivePin
