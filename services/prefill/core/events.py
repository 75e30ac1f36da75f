"""What the core hears of: requests and their end, progress of I/O, and its results."""

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from moonpool.scheduling.block_manager import DeleteKV, LendBlocks, ReturnBlocks
from moonpool.scheduling.request import EngineRequest


@frozen
class KVSource:
    """A kvstore, or another engine instance, to load a prefix from."""

    name: str
    """Equal names mean the same instance."""
    blocks: int
    """Leading blocks it is believed to hold."""
    peer: bool = False
    """It is an engine instance, whose pool is read."""


@frozen
class WriteBackTarget:
    """A kvstore that blocks are written to."""

    store: str
    held: int | None
    """Leading blocks it is believed to hold; None = unknown."""


@frozen
class SubmitJob:
    """A prompt is to be computed. Answered by `Accept`, `Refuse` or `Stale`, and an accepted one by one `EndJob`."""

    job: int
    """Never used twice."""
    request: EngineRequest
    held_blocks: int | None
    """Leading blocks that the decode instance holds; None = the KV goes nowhere."""
    sources: tuple[KVSource, ...] = ()
    """The best first."""
    copies: tuple[WriteBackTarget, ...] = ()
    reuse: bool = True
    """Blocks that are there already may be used; False = every token is computed."""
    max_queue_s: float | None = None
    """Where everything that is here takes longer, it is not taken (`Stale`); None = it is taken all the same."""


@frozen
class CancelJob:
    """Nobody wants the job any more. Without effect on one that has ended."""

    job: int


@frozen
class Drain:
    """New jobs are refused from now on."""


@frozen
class StopAllJobs:
    """The engine has died, or the instance stops: every job ends, and nothing new begins."""


@frozen
class LayerComputed:
    """A step's KV of one layer is in the pool. Layers come in order."""

    step: int
    layer: int


@frozen
class LayerLoaded:
    """All slices of one layer of a load are in the pool, verified. Layers come in order."""

    io: int
    layer: int


@frozen
class ReplicateBlocks:
    """A chain's blocks are to be read from a peer and kept. Answered by one `EndCopy`."""

    number: int
    """Never used twice."""
    keys: tuple[BlockKey, ...]
    source: KVSource
    tenant: str = ""


Event = (
    SubmitJob
    | CancelJob
    | Drain
    | StopAllJobs
    | LayerComputed
    | LayerLoaded
    | ReplicateBlocks
    | DeleteKV
    | LendBlocks
    | ReturnBlocks
)


# --- results of I/O: each comes in one `Ended` --------------------------------------------------------------------


@frozen
class StepEnded:
    """No stage touches the step's blocks any more."""

    aborted: bool
    """Some layer was not computed, and nothing was sampled."""
    seconds: float
    share: float = 1.0
    """Of the engine's cores, that it had: others of the host had the rest."""


@frozen
class LoadEnded:
    """Nothing more is written into the load's blocks."""

    blocks: int
    """Leading blocks of the load that are whole in all layers."""
    missing: int | None = None
    """The first block of the load that the source has lost, or, if it is a peer, does not lend."""
    failed: bool = False
    """The source did not do what it should have done: it is left alone for a while."""
    seconds: float = 0.0


@frozen
class SlicesSent:
    """The memory of the slices is not read any more."""

    nbytes: int
    seconds: float


@frozen
class IoDone:
    """A transfer is open, a verdict was good, or a put is over in any way."""


@frozen
class IoFailed:
    """Opening a transfer, sending or the verdict has failed; the shell knows the error. Also after `Cancel`."""

    damaged_block: int | None = None
    """Index in the sequence of a block that came to decode damaged."""


IoResult = StepEnded | LoadEnded | SlicesSent | IoDone | IoFailed
