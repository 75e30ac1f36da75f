"""Plans one request: turns loads, counters and index matches into placement's views. Time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moonpool.errors import InvalidRequest, Unavailable
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.index import PrefixIndex
from services.conductor.placement import (
    DecodeChoice,
    DecodeView,
    Demand,
    PrefillChoice,
    PrefillView,
    Shape,
    rank_decodes,
    rank_prefills,
)
from services.conductor.registry import DECODE, KVSTORE, PREFILL, Member, Registry
from services.conductor.stores import Forks, StoreView, by_reading, choose_write_back, scores

EXPECTED_ANSWER_TOKENS = 256
"""Answers are mostly shorter than their limit; decode instances are compared for at most so many tokens."""

MAX_OTHER_SOURCES = 2
"""Further stores to load a prefix from if the chosen one fails."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request could go, best first.

    `decodes` is empty when decode is not wanted. The prefix is loaded from the first of `sources` that answers;
    `write_back` are the kvstores that shall hold the chain. `index_version` is the state of the index behind the plan.
    """

    prefill: PrefillChoice
    decodes: tuple[DecodeChoice, ...]
    sources: tuple[StoreView, ...]
    write_back: tuple[StoreView, ...]
    candidates: tuple[PrefillChoice, ...]
    demand: Demand
    index_version: int
    emulated: bool = False

    def placement(self, decode: str) -> conductor_pb2.Placement:
        """The contract's form, with the decode instance that gave its promise."""
        return conductor_pb2.Placement(
            prefill=self.prefill.id,
            decode=decode,
            kvstore=self.prefill.kvstore,
            predicted_cached_blocks=self.prefill.used_blocks,
            predicted_ttft_s=self.prefill.ttft_s,
            emulated=self.emulated,
        )


class Planner:
    """Plans requests from registry and index, which it only reads; remembers where chains fork."""

    def __init__(
        self, registry: Registry, index: PrefixIndex, balancing_threshold: float, kvstore_replicas: int = 1
    ) -> None:
        self._registry = registry
        self._index = index
        self._threshold = balancing_threshold
        self._replicas = kvstore_replicas
        self._forks = Forks()

    def plan(
        self,
        *,
        tokens: int,
        answer_tokens: int,
        keys: Sequence[bytes],
        prompt_key: bytes,
        now: float,
        suspects: Collection[str] = (),
    ) -> Plan:
        """Plan a sequence of `tokens` tokens to compute and `answer_tokens` more to generate.

        Args:
            tokens: prompt and, for a continued answer, what was generated before.
            answer_tokens: tokens still to be generated; with 1, prefill alone can serve the request.
            keys: of all full blocks of `tokens`.
            prompt_key: hash of the prompt, which decides on the store when there is no full block.
            now: seconds of the clock that in-flight counters use.
            suspects: ids of instances that failed this request before; used only when no other is left.

        Raises:
            Unavailable: no prefill or no decode instance takes requests.
            InvalidRequest: no instance is large enough, ever.
        """
        layout = self._registry.layout
        if layout is None or not self._registry.ready:
            raise Unavailable("no prefill or no decode instance has joined" + self._missing())
        shape = Shape(layout.block_tokens, layout.token_bytes, layout.layers)
        demand = Demand(
            prompt_tokens=tokens,
            prompt_blocks=layout.blocks_for(tokens),
            total_blocks=layout.blocks_for(tokens + answer_tokens),
            decode_tokens=min(answer_tokens - 1, EXPECTED_ANSWER_TOKENS),
        )
        held = self._index.match(keys)
        stores = self._store_views(keys or [prompt_key], held)
        prefills = [self._prefill_view(m, held, now, suspects) for m in self._of_kind(PREFILL)]
        ranked = rank_prefills(demand, shape, prefills, stores, self._threshold)
        best = ranked[0]
        if best.excluded:
            raise InvalidRequest("prompt", f"no prefill instance can take it ({best.excluded})")
        decodes = self._rank_decodes(demand, shape, held, suspects) if answer_tokens > 1 else []
        return Plan(
            prefill=best,
            decodes=tuple(decodes),
            sources=_sources(stores, best),
            write_back=self._write_back(keys, stores),
            candidates=tuple(ranked),
            demand=demand,
            index_version=self._index.version,
            emulated=self._registry.emulated,
        )

    def _store_views(self, keys: Sequence[bytes], held: dict[str, int]) -> list[StoreView]:
        members = [member for member in self._of_kind(KVSTORE) if not member.load.draining]
        longest = max((held.get(member.id, 0) for member in members), default=0)
        # The first block that no store holds decides, which is the first that may be the chain's own.
        key = keys[min(longest, len(keys) - 1)]
        wanted = scores(key, {member.id: member.capacity_bytes for member in members})
        return [
            StoreView(
                id=member.id,
                blocks=held.get(member.id, 0),
                busy=max(member.load.running, len(member.loads)),
                score=wanted[member.id],
            )
            for member in members
        ]

    def _write_back(self, keys: Sequence[bytes], stores: Sequence[StoreView]) -> tuple[StoreView, ...]:
        """The stores that shall hold the chain, also for a prompt without a full block: its answer may fill some."""
        longest = max((store.blocks for store in stores), default=0)
        parts = len(stores) > self._replicas and 0 < longest < len(keys)  # else there is nothing to decide
        shared = parts and self._forks.shared(keys[longest - 1], keys[longest])
        return tuple(choose_write_back(stores, self._replicas, shared=shared))

    def _rank_decodes(
        self, demand: Demand, shape: Shape, held: dict[str, int], suspects: Collection[str]
    ) -> list[DecodeChoice]:
        decodes = self._of_kind(DECODE)
        ranked = rank_decodes(demand, shape, [self._decode_view(m, held, suspects) for m in decodes])
        if not ranked:
            largest = max(m.total_blocks for m in decodes)
            raise InvalidRequest(
                "sampling.max_tokens",
                f"prompt and answer need {demand.total_blocks} KV blocks, no decode instance has more than {largest}",
            )
        return ranked

    def _of_kind(self, kind: kv_pb2.InstanceKind.ValueType) -> list[Member]:
        return self._registry.of_kind(kind)

    def _missing(self) -> str:
        kinds = ((PREFILL, "prefill"), (DECODE, "decode"))
        missing = [name for kind, name in kinds if not any(not m.load.draining for m in self._of_kind(kind))]
        return f" (missing: {', '.join(missing)})"

    def _prefill_view(self, member: Member, held: dict[str, int], now: float, suspects: Collection[str]) -> PrefillView:
        speeds = member.tracker.speeds
        # Requests of other conductors show only in reports, our latest ones only in our own counters.
        reported = speeds.prefill_per_token_s * member.load.queued_tokens
        return PrefillView(
            id=member.id,
            speeds=speeds,
            queue_s=max(member.prefills.queue_seconds(now), reported),
            local_blocks=held.get(member.id, 0),
            total_blocks=member.total_blocks,
            placed=member.placed,
            draining=member.load.draining,
            suspect=member.id in suspects,
        )

    def _decode_view(self, member: Member, held: dict[str, int], suspects: Collection[str]) -> DecodeView:
        load = member.load
        reported_room = load.free_blocks + load.cached_blocks - load.promised_blocks
        return DecodeView(
            id=member.id,
            speeds=member.tracker.speeds,
            sequences=max(load.running + load.waiting, len(member.decodes)),
            context_tokens=max(load.context_tokens, member.decodes.total_context_tokens()),
            room_blocks=reported_room - member.decodes.total_unreported_blocks(),
            total_blocks=member.total_blocks,
            held_blocks=held.get(member.id, 0),
            placed=member.placed,
            passed_over=member.passed_over,
            draining=load.draining,
            suspect=member.id in suspects,
        )


def _sources(stores: Sequence[StoreView], choice: PrefillChoice) -> tuple[StoreView, ...]:
    """The stores to load from, the chosen one first; none when nothing is loaded."""
    if not choice.kvstore:
        return ()
    holders = [store for store in by_reading(stores) if store.blocks > choice.local_blocks]
    return tuple(holders[: 1 + MAX_OTHER_SOURCES])
