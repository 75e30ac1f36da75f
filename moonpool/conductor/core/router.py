"""The plan of a request: instances that serve it, the source of its prefix, and kvstores that keep its blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.sampling_params import LORA
from moonpool.base.scheduling.latency import transfer_seconds
from moonpool.conductor.core.block_trie import Prefixes, blocks_at
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.decode_side_prefill import DecodeSidePrefill
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.latency_model import DecodeLatencyModel, PrefillLatencyModel
from moonpool.conductor.core.prefill_instance import PrefillInstanceState
from moonpool.conductor.core.prefill_pool import PrefillPool
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.core.prefix_index import PrefixIndex
from moonpool.conductor.core.prefix_sources import PrefixSources, holders_to_load_from
from moonpool.conductor.core.replication import ReplicationHint
from moonpool.conductor.core.routing import RoutingConfig, RoutingDecision, RoutingRequest
from moonpool.conductor.core.store_pool import RowsPlace, StorePool
from moonpool.conductor.placement.base import DecodeChoice, PrefillChoice


class Router:
    """The choice of instances, by the pools and the prefix index.

    Args:
        index: which instance holds which blocks.
        prefills: the prefill instances.
        decodes: the decode instances.
        stores: the kvstores.
        config: how requests are routed.
    """

    def __init__(
        self, index: PrefixIndex, prefills: PrefillPool, decodes: DecodePool, stores: StorePool, config: RoutingConfig
    ) -> None:
        shared = config.policy.stores
        self._index = index
        self._prefills = prefills
        self._decodes = decodes
        self._stores = stores if shared else None
        self._threshold = config.balancing_threshold
        self._at_decode = DecodeSidePrefill(decodes, config.decode_prompt_tokens)
        self._replicates = shared and config.copy_share > 0
        self._sources = PrefixSources((prefills, decodes) if shared and config.peers else (), self._stores)

    def plan(self, request: RoutingRequest, shape: KVShape) -> RoutingDecision:
        """Route a request; `shape` is that of the cluster's KV.

        Raises:
            Unavailable: no instance that is large enough takes requests now.
            InvalidRequest: no instance that was ever here is large enough, or none has an option that the request sets.
        """
        keys, stores = request.keys, self._stores
        row_keys = [] if stores is None else [(key, self._index.match([key])) for key in request.row_keys]
        rows = tuple([stores.rows(key, prefixes) for key, prefixes in row_keys] if stores is not None else ())
        demand = request.demand(shape, rows)
        for pool in (self._prefills, self._decodes) if demand.needs else ():
            if option := pool.nobody_has(demand.needs):
                field = "model" if option.startswith(LORA) else f"sampling.{option}"
                raise InvalidRequest(field, "no engine of this cluster can serve it")
        prefixes = self._index.match(keys)
        views = stores.views(keys, request.prompt_key, prefixes) if stores is not None else []
        usable, readable = prefixes, views
        if shape.window_blocks:  # a chain can be continued only where the windows before that point are held, too
            usable = self._index.continuable(keys, prefixes, shape.window_blocks)
            readable = stores.views(keys, request.prompt_key, usable) if stores is not None else []
        sources = self._sources.of(readable, usable, lambda pool: pool.mask_of(request.suspects), request.now)
        model = PrefillLatencyModel(demand, shape, sources, self._threshold)
        candidates = self._prefill(request, demand, shape, self._prefills.soon(usable, keys), model)
        best = candidates[0]
        both = bool(self._prefills.both_mask >> self._index.slot(best.id) & 1)
        if both:  # the answer stays where the prompt is computed
            decodes = [self._decodes.choice_at(best.id, DecodeLatencyModel(demand, shape), demand.prompt_blocks)]
        else:
            domain = self._domain(best.id)
            decodes = self._decode(request, demand, shape, prefixes, domain) if demand.decode_tokens else []
        # An engine in a KV domain of its own reads no kvstore and writes to none, unless it says so.
        if not self._prefills.by_slot[self._index.slot(best.id)].facts.loads:
            sources, stores, rows = [], None, ()
        decision = RoutingDecision(
            prefill=best,
            decodes=tuple(decodes),
            sources=holders_to_load_from(
                sources, best.source, best.local_blocks, blocks_at(usable, self._index.slot(best.id))
            ),
            write_back=stores.write_back(keys, request.prompt_key, views) if stores is not None else (),
            candidates=tuple(candidates),
            demand=demand,
            index_version=self._index.version,
            emulated=shape.emulated,
            both=both,
            send_s=self._send_s(best, decodes, prefixes, demand, shape) if decodes and not both else 0.0,
            hint=self._hint(model, candidates, sources, shape) if self._replicates and sources else None,
            rows=self._rows_behind(best, request, shape, rows) if rows else (),
        )
        # Last, since the best prefill instance is what decode's own computing must beat.
        if both or not (decodes and request.at_decode and self._at_decode):
            return decision
        return self._at_decode.weigh(decision, shape, usable, request.suspects)

    @staticmethod
    def _rows_behind(
        best: PrefillChoice, request: RoutingRequest, shape: KVShape, rows: Sequence[RowsPlace | None]
    ) -> tuple[RowsPlace | None, ...]:
        """Return where rows are kept, of the pictures behind the prefix that the instance need not compute."""
        prefix = shape.reused_tokens(request.tokens, best.used_blocks)
        ends = [end for _, end in request.pictures]
        return tuple([place if end > prefix else None for place, end in zip(rows, ends, strict=True)])

    def _prefill(
        self,
        request: RoutingRequest,
        demand: Demand,
        shape: KVShape,
        prefixes: Prefixes,
        model: PrefillLatencyModel,
    ) -> list[PrefillChoice]:
        pool, suspects, paired = self._prefills, self._suspected(request.suspects), self._paired(demand)
        if pool.both_mask:
            decodes, answer = self._decodes, DecodeLatencyModel(demand, shape)
            paired &= ~pool.both_mask | decodes.eligible_mask(demand.total_blocks, demand.needs)
            suspects |= pool.both_mask & ~decodes.roomy_mask(pool.both_mask, answer) | pool.mask_of(request.full)
        choices = pool.choose(demand, model, prefixes, request.now, suspects, request.to_place(demand), paired)
        if choices[0].excluded:  # the excluded come last: if one is first, no instance can serve the request
            if pool.both_mask and demand.prompt_blocks <= pool.largest_blocks:
                self._check_size(demand)
            if demand.prompt_blocks <= pool.largest_blocks:
                raise Unavailable(f"no prefill instance takes the prompt now ({choices[0].excluded})")
            raise InvalidRequest("prompt", f"no prefill instance can take the request ({choices[0].excluded})")
        return choices

    def _suspected(self, suspects: Collection[str]) -> int:
        """Return the mask of the prefill instances that are suspects, or from which KV goes to suspects only."""
        mask, decodes = self._prefills.mask_of(suspects), self._decodes.mask_of(suspects)
        # KV does not leave a domain: with all its decode instances suspect, its prefill instances lead nowhere.
        for domain in self._prefills.domains if decodes else ():
            if domain and not self._decodes.domain_mask(domain) & ~decodes:
                mask |= self._prefills.domain_mask(domain)
        return mask

    def _paired(self, demand: Demand) -> int:
        """Mask of the prefill instances whose KV a decode instance could take, if the request needs decode."""
        domains = list(self._prefills.domains)
        if domains == [""] or not demand.decode_tokens:
            return ~0
        decodes, mask = self._decodes, 0
        for domain in domains:
            if decodes.eligible_mask(demand.total_blocks, demand.needs, decodes.domain_mask(domain)):
                mask |= self._prefills.domain_mask(domain)
        return mask

    def _domain(self, prefill: str) -> str:
        return self._prefills.by_slot[self._index.slot(prefill)].facts.kv_domain

    def _send_s(
        self,
        best: PrefillChoice,
        decodes: Sequence[DecodeChoice],
        prefixes: Prefixes,
        demand: Demand,
        shape: KVShape,
    ) -> float:
        """Seconds that the chosen instance's link has to do for the KV that the best decode instance lacks."""
        speeds = self._prefills.by_slot[self._index.slot(best.id)].learnt.speeds
        held = blocks_at(prefixes, self._index.slot(decodes[0].id)) * shape.block_size
        return transfer_seconds(speeds, shape.moved_bytes(demand.prompt_tokens, held))

    def _hint(
        self,
        model: PrefillLatencyModel,
        choices: Sequence[PrefillChoice],
        sources: Sequence[PrefixHolder],
        shape: KVShape,
    ) -> ReplicationHint | None:
        """Return the instance with the soonest first token if the longest prefix were there; None = none."""
        source, best_s = max(sources, key=lambda source: source.blocks), choices[0].ttft_s
        found: tuple[float, str, PrefillChoice, PrefillInstanceState] | None = None
        least_s = best_s
        for choice in choices:
            soonest_s = choice.queue_s + choice.tail_s + choice.overhead_s
            # A copy helps only where the prefix is missing, and where its queue alone does not lose already.
            if choice.excluded or choice.local_blocks >= source.blocks or soonest_s > least_s:
                continue
            instance = self._prefills.by_slot[self._index.slot(choice.id)]
            facts = instance.facts
            if facts.takes_copies:
                optimism = self._prefills.optimism_factor(instance)
                alone_s = model.alone_s(
                    instance.learnt.speeds, facts.stages, facts.max_num_batched_tokens, source.blocks
                )
                rated = soonest_s + alone_s * optimism, choice.id, choice, instance
                if rated[0] < best_s and (found is None or rated < found):
                    found, least_s = rated, rated[0]
        if found is None:
            return None
        ttft_s, target, choice, instance = found
        gain_s = best_s - ttft_s
        nbytes = shape.moved_bytes(source.blocks * shape.block_size, choice.local_blocks * shape.block_size)
        cold_bytes = source.cold_blocks(choice.local_blocks) * shape.block_size * shape.token_bytes
        read_s = source.read_s(source.rate(instance.learnt.speeds), nbytes, cold_bytes)
        return ReplicationHint(source.blocks, target, source.id, gain_s, read_s)

    def _decode(
        self, request: RoutingRequest, demand: Demand, shape: KVShape, prefixes: Prefixes, domain: str
    ) -> list[DecodeChoice]:
        pool, suspects = self._decodes, self._decodes.mask_of(request.suspects)
        model = DecodeLatencyModel(demand, shape)
        choices = pool.choose(demand, model, prefixes, suspects, request.placed(demand), domain)
        if not choices:
            self._check_size(demand)
            raise Unavailable(f"{_need(demand)} with so many takes requests now")
        return choices

    def _check_size(self, demand: Demand) -> None:
        """Check that prompt and answer fit into the largest decode instance.

        Raises:
            InvalidRequest: they do not.
        """
        largest = self._decodes.largest_blocks
        if demand.total_blocks > largest:
            raise InvalidRequest("sampling.max_tokens", f"{_need(demand)} has more than {largest}")


def _need(demand: Demand) -> str:
    return f"prompt and answer need {demand.total_blocks} KV blocks, no decode instance"
