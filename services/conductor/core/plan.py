"""Where a request could go, and what its life needs of the conductor's picture of the cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.conductor.core.failures import Failure


@dataclass(frozen=True, slots=True)
class DecodeOption:
    """A decode instance that could take the request; `fits` = it has room by its last report and own claims."""

    id: str
    incarnation: int
    tbt_s: float
    fits: bool


@dataclass(frozen=True, slots=True)
class StoreOption:
    """A kvstore to load a prefix from, or to write back to, with the leading blocks of the chain that it holds."""

    id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """The prediction for one prefill instance, seconds; `excluded` says why it cannot be used."""

    id: str
    local_blocks: int
    used_blocks: int
    queue_s: float
    load_s: float
    prefill_s: float
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The best placement of one request.

    Attributes:
        prefill: id of the prefill instance, of this incarnation.
        ttft_s: predicted time to first token, seconds from now; `busy_s` of it the instance works for the request.
        used_blocks: leading blocks of the prompt that are not computed.
        kvstore: where a prefix is loaded from; "" for nowhere.
        decodes: best first, those without room last; empty when decode is not wanted.
        total_blocks: room for prompt and answer at decode.
        prompt_tokens: tokens whose KV decode receives.
        sources: kvstores to load the prefix from, best first.
        write_back: kvstores that shall hold the chain.
        candidates: all prefill instances, for `Explain`.
        index_version: the index's state behind the plan.
        emulated: compute is emulated.
    """

    prefill: str
    incarnation: int
    ttft_s: float
    busy_s: float
    used_blocks: int
    kvstore: str
    decodes: tuple[DecodeOption, ...]
    total_blocks: int
    prompt_tokens: int
    sources: tuple[StoreOption, ...] = ()
    write_back: tuple[StoreOption, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    index_version: int = 0
    emulated: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed: `tokens` to compute, at most `answer_tokens` to generate after them.

    `keys` are those of all full blocks of `tokens`; `prompt_key` decides on the store when there is none. `suspects`
    are instances that failed this request before: used only when no other is left.
    """

    tokens: int
    answer_tokens: int
    keys: tuple[bytes, ...]
    prompt_key: bytes
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """How a prompt was prefilled; `misses` are (kvstore, key) that the index believed to be there."""

    computed_tokens: int
    local_tokens: int
    loaded_tokens: int
    prefill_s: float
    misses: tuple[tuple[str, bytes], ...] = ()


class Picture(Protocol):
    """What the conductor believes of its instances. A claim counts there from its begin to its release."""

    def plan(self, demand: Demand, now: float) -> Plan | Failure:
        """The best placement by the picture of now."""

    def claim_prefill(self, claim: int, plan: Plan, now: float) -> None:
        """Counts a prompt in the queue of the plan's prefill instance, and on the kvstore that it loads from."""

    def claim_decode(self, claim: int, decode: str, plan: Plan, now: float) -> None:
        """Counts a sequence at a decode instance."""

    def release(self, claim: int, now: float) -> None:
        """Stops counting it."""

    def prefilled(self, plan: Plan, how: Prefilled) -> None:
        """Learns from a prefill that was done."""

    def room_of(self, decode: str) -> tuple[int, int]:
        """Blocks that are free there after all claims, and all its blocks; (0, 0) when it takes no requests."""

    def only(self, suspects: Sequence[str]) -> bool:
        """Whether all prefill instances, or all decode instances, are among the suspects."""
