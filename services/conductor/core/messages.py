"""Events and actions of the requests' life. Requests have numbers, which the shell gives and never uses again."""

from enum import Enum

from moonpool.core.fair import Place, rank
from moonpool.core.kernel import Cancel, Ended
from moonpool.frozen import frozen
from services.conductor.core.admission import Slo
from services.conductor.core.changes import ChangeRole, RoleAsked
from services.conductor.core.cost import PrefillChoice
from services.conductor.core.facts import InstanceFacts, LoadFacts
from services.conductor.core.failures import Failure, Stale
from services.conductor.core.hot import Replicate
from services.conductor.core.lengths import Stratum, stratum_of
from services.conductor.core.pace import Foreseen
from services.conductor.core.plan import Plan

ATTEMPT_MARK = "~"  # separates a request's id from the number of the attempt in the ids that engines see


class Finish(Enum):
    """Why an answer is complete."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3


@frozen
class Target:
    """Room that a decode instance has promised to one transfer."""

    decode: str
    incarnation: int
    address: str
    transfer_id: int
    generation: int
    held_blocks: int


@frozen
class Resumed:
    """How far a request is whose client has lost its conductor.

    Attributes:
        tokens: of the answer, that the client has; 0 when there are several.
        fence: how often it has resumed, this time included.
        sequence: the id under which decode knew it last.
        target: decode's promise then; its address is not known here. None = there was none.
    """

    tokens: int
    fence: int
    sequence: str
    target: Target | None


@frozen
class Ask:
    """A request, without its tokens.

    Attributes:
        number: names it in events and actions.
        id: as the client knows it.
        prompt_tokens: length of the prompt; `max_tokens` are generated at most.
        prompt_key: hash of the prompt.
        slo: what is expected.
        arrived: when it came; `deadline` when it fails. Seconds of the core's clock.
        choices: sequences that run together, answers or beams; prefill computes the prompt alone for several.
        beams: they are beams: tokens come when all are known, and what is placed anew begins again.
        tenant: whose it is; `weight` is its share, relative to others'.
        scored: the prompt's log probabilities are wanted: prefill computes all of it.
        resumed: it is not new.
        priority: among the tenant's own; lower ones go first.
        least_tokens: the answer has at least; `max_tokens` where nothing ends it before.
    """

    number: int
    id: str
    prompt_tokens: int
    max_tokens: int
    prompt_key: bytes
    slo: Slo
    arrived: float
    deadline: float
    choices: int = 1
    beams: bool = False
    tenant: str = ""
    scored: bool = False
    resumed: Resumed | None = None
    priority: int = 0
    weight: float = 1.0
    least_tokens: int = 0

    @property
    def place(self) -> Place:
        """Where it stands among others that wait."""
        return Place(self.tenant, rank(self.arrived, self.priority), self.number, self.weight)

    @property
    def stratum(self) -> Stratum:
        """For forecasts of the answer's length."""
        return stratum_of(self.tenant, self.prompt_tokens)


# --- events ---------------------------------------------------------------------------------------------------------


@frozen
class Arrived:
    """A valid request; `keys` are those of the full blocks of its prompt, and of the answer so far if it is resumed."""

    ask: Ask
    keys: tuple[bytes, ...]


@frozen
class Rehashed:
    """Answer to `Rehash`: keys of the full blocks of prompt and `tokens`, those not generated again (0 of several)."""

    request: int
    tokens: int
    keys: tuple[bytes, ...]


@frozen
class Stopped:
    """The answer shall end now: with the tokens so far, or with a failure, as it cannot be told."""

    request: int
    failure: Failure | None = None


@frozen
class ClientGone:
    """Nobody waits for the answer any more."""

    request: int


@frozen
class Accepted:
    """A prefill (its io) has the prompt in its queue, as its `taken`-th."""

    io: int
    taken: int = 0


@frozen
class Prefilled:
    """How a prompt was prefilled; `misses` are (instance, key) that the index believed to be there.

    `loads` are (instance, blocks, seconds) of reads that gave all that was wanted. `there_s` are seconds from its
    coming to its first token, as the instance measured them.
    """

    computed_tokens: int
    there_s: float
    misses: tuple[tuple[str, bytes], ...] = ()
    loads: tuple[tuple[str, int, float], ...] = ()


@frozen
class FirstToken:
    """A prefill (its io) has given its token, which the answer has; `finish` is set when it completes the answer.

    `known`: the answer had it already, as its sequence goes on elsewhere meanwhile.
    """

    io: int
    how: Prefilled
    finish: Finish | None = None
    known: bool = False


@frozen
class Delivered:
    """A prefill (its io) says that all KV has arrived at decode."""

    io: int


@frozen
class Tokens:
    """The answer has `count` more tokens from a sequence (its io); 0 when it knew those that came.

    `finish` is set when they complete the answer; `known` when decode has said so itself, whose call then ends.
    """

    io: int
    count: int
    finish: Finish | None = None
    known: bool = False


@frozen
class Joined:
    """An instance has joined, perhaps again."""

    facts: InstanceFacts


@frozen
class Left:
    """An incarnation of an instance is not a member any more. With `lost` its requests fail now, with this reason."""

    instance: str
    incarnation: int
    lost: str = ""


@frozen
class Reported:
    """An instance has reported its load."""

    instance: str
    load: LoadFacts


@frozen
class KeysChanged:
    """A message of an instance's KV events."""

    instance: str
    sequence: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    snapshot_begin: bool
    snapshot_end: bool
    cooled: tuple[bytes, ...] = ()
    """Of a kvstore's: on its SSD only from now on."""


@frozen
class Promised:
    """Result of `Reserve`: room is kept for `lease_s` seconds without news. It is decode's `taken`-th promise.

    `tbt_s`: the time between tokens that decode predicts.
    """

    target: Target
    lease_s: float
    taken: int = 0
    tbt_s: float = 0.0


Result = Promised | Stale | Failure | None
"""Of any I/O; None = it ended as it should."""

FromClient = Arrived | Rehashed | Stopped | ClientGone
FromCall = Accepted | FirstToken | Delivered | Tokens
FromCluster = Joined | Left | Reported | KeysChanged | RoleAsked
Event = FromClient | FromCall | FromCluster | Ended[Result]

# --- actions --------------------------------------------------------------------------------------------------------


@frozen
class Reserve:
    """Ask a decode instance for room. Ends with `Promised` or a failure; it is never cancelled.

    `tbt_slo_s` is to be kept from `starts_in_s` seconds on.
    """

    io: int
    request: int
    sequence: str
    decode: str
    incarnation: int
    tbt_slo_s: float | None
    starts_in_s: float
    stores: tuple[str, ...]


@frozen
class Prefill:
    """Call a prefill instance; `target` is None when only its token is wanted. Ends with None, `Stale` or a failure.

    It is `Stale` where everything that is there takes longer than `max_queue_s`; None = however long it takes.
    """

    io: int
    request: int
    sequence: str
    plan: Plan
    incarnation: int
    target: Target | None
    max_queue_s: float | None


@frozen
class Start:
    """Tell decode the first token and follow the sequence. `Cancel` ends it there and here.

    With `compute` decode computes what it does not hold of the prompt, and the first token.
    """

    io: int
    request: int
    sequence: str
    target: Target
    compute: bool = False


@frozen
class Adopt:
    """Take a request over at decode, and follow it from what its client has. `Cancel` ends it there and here."""

    io: int
    request: int
    sequence: str
    target: Target
    fence: int


@frozen
class Renew:
    """Keep the conductor's session with decode, by which the promise lives."""

    target: Target


@frozen
class Undo:
    """Tell decode that the promise, not started yet, is not wanted.

    Where the answer to `Reserve` was lost, its name alone is known: the target has no transfer and no address.
    """

    sequence: str
    target: Target


@frozen
class Announce:
    """The request is placed, `waited_s` after it arrived: tell the client, and keep it for `Explain`.

    For `queued_s` it had looked for a place in vain. `sequence` is the id that engines see. Without a target only its
    first token is wanted. `pace` is what of the times between its tokens is foreseen.
    """

    request: int
    plan: Plan
    sequence: str
    target: Target | None
    waited_s: float
    queued_s: float
    pace: Foreseen


@frozen
class Rehash:
    """Give the keys of the prompt and the answer so far; the request is placed again because of `failure`."""

    request: int
    failures: int
    failure: Failure


@frozen
class Complete:
    """The request has ended: tell the client the rest."""

    request: int
    finish: Finish


@frozen
class Fail:
    """The request has ended with an error; `refused` before or between placements, with what was considered."""

    request: int
    failure: Failure
    refused: bool = False
    candidates: tuple[PrefillChoice, ...] = ()


@frozen
class Drop:
    """The request has ended; its client is gone."""

    request: int


@frozen
class Resync:
    """An instance's KV events have a gap: order a snapshot."""

    instance: str


@frozen
class LetGo:
    """Follow a sequence (its io) no more, and leave it at decode for another conductor."""

    io: int


Order = Reserve | Prefill | Start | Adopt | Renew | Undo | Resync | Replicate | ChangeRole | LetGo | Cancel
Action = Order | Announce | Rehash | Complete | Fail | Drop
