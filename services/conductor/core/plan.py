"""Where a request could go."""

from typing import NamedTuple

from moonpool.frozen import frozen
from services.conductor.core.cost import DecodeChoice, PrefillChoice
from services.conductor.core.facts import Demand
from services.conductor.core.reads import Source
from services.conductor.core.stores import StoreView


class Wish(NamedTuple):
    """What a prompt would have gained if an instance had held a prefix of it.

    `gain_s` are the seconds to the first token, `read_s` those that the source's link takes.
    """

    blocks: int
    target: str
    source: str
    gain_s: float
    read_s: float


@frozen
class Plan:
    """Where a request could go, best first.

    Attributes:
        prefill: the best of `candidates`.
        decodes: a few, best first; empty when decode is not wanted.
        sources: the prefix is loaded from the first of them that answers.
        write_back: kvstores that shall hold the chain.
        candidates: the best prefill instances, then some that cannot be used.
        demand: what was asked for.
        index_version: state of the index behind the plan, for `Picture.forget`.
        emulated: compute is emulated.
        send_s: seconds of sending to decode what that lacks.
        wish: the copy of a prefix from which it would have gained; None = none, or there are no copies.
        at_decode: the one decode instance computes the rest of the prompt itself; `prefill` says what that takes.
    """

    prefill: PrefillChoice
    decodes: tuple[DecodeChoice, ...]
    sources: tuple[Source, ...]
    write_back: tuple[StoreView, ...]
    candidates: tuple[PrefillChoice, ...]
    demand: Demand
    index_version: int
    emulated: bool = False
    at_decode: bool = False
    wish: Wish | None = None
    send_s: float = 0.0
