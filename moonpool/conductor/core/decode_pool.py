"""The decode instances, and which of them is best for an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.conductor.core.block_trie import blocks_at
from moonpool.conductor.core.decode_instance import DecodeInstanceState
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.instance_pool import InstancePool
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.core.latency_model import DecodeLatencyModel, step_load_s
from moonpool.conductor.core.load_ranking import SHORTLIST, LoadRanking
from moonpool.conductor.placement.base import (
    DecodeCandidates,
    DecodeChoice,
    DecodePolicy,
    PlacementRequest,
    RankedInstance,
)
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY

CLASS_WIDTH = 1.5
"""Factor by which measured speeds of identical instances differ on noisy machines."""
TRANSFER_BYTES = 1 << 28
"""Bytes of KV by which transfers are compared."""


class DecodePool(InstancePool[DecodeInstanceState]):
    """All decode instances, ranked by what runs on them.

    Args:
        policy: orders those that may take a request.
    """

    def __init__(self, policy: DecodePolicy = DECODE_POLICIES[DEFAULT_DECODE_POLICY]) -> None:
        super().__init__(LoadRanking(CLASS_WIDTH, TypicalDecodeSeconds()))
        self._policy = policy

    def rank(self, instance: DecodeInstanceState) -> None:
        """Rank an instance anew, after a change in load or speeds."""
        sequences, context = instance.sequences, instance.context_tokens
        self.ranks.put(
            instance.slot,
            instance.speeds,
            lambda speeds: step_load_s(speeds, sequences, context),
            instance.turn,
            instance.facts.id,
        )

    def available_of(self, decode: str) -> tuple[int, int]:
        """Blocks that an instance could reserve now, and all the instance's blocks; (0, 0) if not taking requests."""
        instance = self.get(decode)
        if instance is None or instance.load.draining:
            return 0, 0
        return instance.available_blocks, instance.facts.total_blocks

    def choice_at(self, decode: str, model: DecodeLatencyModel, held_blocks: int) -> DecodeChoice:
        """Return the prediction for an answer at a member, which holds so many leading blocks of the prompt."""
        instance = self._by_id[decode]
        need = model.blocks(instance.load.answer_tokens)
        optimism = self.optimism_factor(instance)
        choice = model.choice(decode, instance.speeds, instance.there, held_blocks, need, optimism)
        chunk_s = instance.least_chunk_s
        return choice._replace(tbt_s=choice.tbt_s + chunk_s) if chunk_s else choice

    def roomy_mask(self, within: int, model: DecodeLatencyModel) -> int:
        """Return the mask of the instances within a mask that could reserve memory for a request now."""
        roomy = 0
        for slot in slots_in(within):
            instance = self.by_slot[slot]
            if instance.available_blocks >= model.blocks(instance.load.answer_tokens):
                roomy |= 1 << slot
        return roomy

    def answer_tokens(self, decode: str) -> int:
        """Return the number of tokens that an instance expects a new answer to have; 0 = not reported."""
        instance = self.get(decode)
        return instance.load.answer_tokens if instance is not None else 0

    def choose(
        self,
        demand: Demand,
        model: DecodeLatencyModel,
        prefixes: Sequence[tuple[int, int]],
        suspects: int,
        request: PlacementRequest,
        domain: str,
    ) -> list[DecodeChoice]:
        """A few instances of a KV domain that could take the request, best first; none if no instance is large enough.

        Instances without free memory by their last report come after the others: the report may be stale, and
        `CallReserve` decides. Memory is counted for the answer that each instance expects, not for the longest.
        Instances of the mask `suspects`, which failed this request before, come last.
        """
        able = self.eligible_mask(demand.total_blocks, demand.needs, self.domain_mask(domain))
        choices: list[DecodeChoice] = []
        for allowed in (able & ~suspects, able & suspects):
            for roomy in (True, False):  # reports may be stale: those that seem full are asked after the others
                if allowed and len(choices) < SHORTLIST:
                    candidates = PoolDecodeCandidates(self, model, prefixes, request, allowed, roomy)
                    choices += self._policy.order(candidates, SHORTLIST - len(choices))
        return choices


@frozen
class PoolDecodeCandidates(DecodeCandidates):
    """Instances of a pool that are large enough and take requests, with free memory or without: `allowed`, a mask."""

    _pool: DecodePool
    _model: DecodeLatencyModel
    _prefixes: Sequence[tuple[int, int]]
    request: PlacementRequest
    _allowed: int
    _roomy: bool

    def __iter__(self) -> Iterator[RankedInstance]:
        return (self._pool.ranks.place(slot) for slot in slots_in(self._allowed) if self._fits(slot))

    def predict(self, instance: RankedInstance) -> DecodeChoice:
        return self._predict(instance.slot, blocks_at(self._prefixes, instance.slot))

    def least(self, limit: int) -> list[DecodeChoice]:
        model, pool = self._model, self._pool
        found = pool.ranks.search(
            self._allowed,
            self._prefixes,
            lambda found, blocks: model.fixed_s(found.speeds, blocks),
            model.load_s,
            limit,
            self._fits,
        )
        places = [(match.place.slot, match.blocks) for match in found]
        starved = pool.starved_slot(self._allowed)
        if starved is not None and self._fits(starved) and all(slot != starved for slot, _ in places):
            places.append((starved, blocks_at(self._prefixes, starved)))
        return [self._predict(slot, blocks) for slot, blocks in places]

    def _fits(self, slot: int) -> bool:
        instance = self._pool.by_slot[slot]
        return (instance.available_blocks >= self._model.blocks(instance.load.answer_tokens)) is self._roomy

    def _predict(self, slot: int, held_blocks: int) -> DecodeChoice:
        return self._pool.choice_at(self._pool.by_slot[slot].facts.id, self._model, held_blocks)


@frozen
class TypicalDecodeSeconds:
    """Seconds by which decode instances are compared: a small step, a large one, and a transfer.

    A class rather than a function, so that a journal can hold the value.
    """

    def __call__(self, speeds: Speeds) -> tuple[float, float, float]:
        send_s = TRANSFER_BYTES / speeds.transfer_bytes_per_s if speeds.transfer_bytes_per_s else 0.0
        return decode_step_seconds(speeds, 1, 2048), decode_step_seconds(speeds, 64, 131072), send_s
