"""Prefill scheduler events: requests and their end, I/O progress, and I/O results."""

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import LendBlocks, ReturnBlocks
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.base.scheduling.request import EngineRequest
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadEnded


@frozen
class WriteBackTarget:
    """A kvstore that blocks are written to. `held`: leading blocks that are believed to be there; None = unknown."""

    store: str
    held: int | None


@frozen
class AddRequest:
    """Asks for a prompt to be computed. Answered by `AcceptRequest`, `RefuseRequest` or `RefuseStaleRequest`.

    An accepted request ends with one `EndRequest`.

    Attributes:
        id: the request's number; never used twice.
        request: what is asked for.
        held_blocks: leading blocks that the decode instance holds; None = the KV is not sent.
        sources: best first.
        copies: kvstores that blocks are written to.
        reuse: cached and stored blocks may be used; False = every token is computed.
        max_queue_s: the request is refused (`RefuseStaleRequest`) if computing all queued requests takes longer,
            seconds; None = no limit.
        delay_s: seconds by which the request stands in the queue behind the place of arrival.
        rows_tokens: tokens of pictures whose rows were read from kvstores, before.
        rows_s: seconds that this took.
    """

    id: int
    request: EngineRequest
    held_blocks: int | None
    sources: tuple[KVSource, ...] = ()
    copies: tuple[WriteBackTarget, ...] = ()
    reuse: bool = True
    max_queue_s: float | None = None
    delay_s: float = 0.0
    rows_tokens: int = 0
    rows_s: float = 0.0


@frozen
class CancelPrefill:
    """Cancels a request; ignored if the request has ended."""

    id: int


@frozen
class Drain:
    """Refuses new requests from now on."""


@frozen
class StopAllRequests:
    """The engine has died, or the instance stops: every request ends, and no new request begins."""


@frozen
class LayerComputed:
    """A step's KV in one layer is in the pool. Layers come in order."""

    step: int
    layer: int


@frozen
class TokensSampled:
    """A step's tokens are known, and all layers are computed. KV of the step is still on the way into the pool."""

    step: int


@frozen
class LayerLoaded:
    """All blocks in one layer of a load are in the pool, verified. Layers come in order."""

    io: int
    layer: int


@frozen
class ReplicateBlocks:
    """Asks for a chain's blocks to be read from a peer and kept. Answered by one `EndReplication`.

    Attributes:
        number: never used twice.
    """

    number: int
    keys: tuple[BlockKey, ...]
    source: KVSource
    tenant: str = ""


@frozen
class StopReplicating:
    """Calls off the replication of the chain that ends with `tail`; ignored without such a replication."""

    tail: BlockKey


Event = (
    AddRequest
    | CancelPrefill
    | Drain
    | StopAllRequests
    | LayerComputed
    | TokensSampled
    | LayerLoaded
    | ReplicateBlocks
    | StopReplicating
    | DeleteKV
    | LendBlocks
    | ReturnBlocks
)


# --- results of I/O: each comes in one `IoEnded` ------------------------------------------------------------------


@frozen
class StepEnded:
    """A step has ended; no stage touches the step's blocks any more.

    Attributes:
        aborted: some layer was not computed, and no token was sampled.
        seconds: of the step, without those for pictures.
        share: part of the engine's cores that the step had; other processes on the host had the rest.
        encoded_tokens: tokens of pictures that were encoded.
        encode_s: seconds that encoding took.
    """

    aborted: bool
    seconds: float
    share: float = 1.0
    encoded_tokens: int = 0
    encode_s: float = 0.0


@frozen
class SlicesSent:
    """Slices were sent; their memory is not read any more."""

    nbytes: int
    seconds: float


@frozen
class IoDone:
    """A transfer is open, a verdict was good, or a write-back has ended in any way."""


@frozen
class IoFailed:
    """Opening a transfer, sending or the verdict has failed, also by `CancelIo`; the executor knows the error.

    Attributes:
        damaged_block: index (in the sequence) of a block that arrived damaged at decode.
    """

    damaged_block: int | None = None


IoResult = StepEnded | LoadEnded | SlicesSent | IoDone | IoFailed
