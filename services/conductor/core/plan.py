"""Where a request could go."""

from dataclasses import dataclass

from services.conductor.core.cost import DecodeChoice, PrefillChoice
from services.conductor.core.facts import Demand
from services.conductor.core.reads import Source
from services.conductor.core.stores import StoreView


@dataclass(frozen=True, slots=True)
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
