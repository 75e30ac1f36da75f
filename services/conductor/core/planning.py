"""Makes plans: where a request could go, by what the picture knows."""

from collections.abc import Collection, Sequence

from moonpool.cost import transfer_seconds
from moonpool.errors import InvalidRequest, Unavailable
from moonpool.frozen import frozen
from services.conductor.core.candidates import Limit
from services.conductor.core.cost import DecodeChoice, DecodeModel, PrefillChoice, PrefillModel
from services.conductor.core.decodes import Decodes
from services.conductor.core.facts import Demand, Shape
from services.conductor.core.index import PrefixIndex
from services.conductor.core.plan import Plan, Wish
from services.conductor.core.pool import blocks_at
from services.conductor.core.prefills import Prefill, Prefills
from services.conductor.core.reads import Source
from services.conductor.core.rests import Rests
from services.conductor.core.sources import Sources, planned
from services.conductor.core.stores import Stores

Prefixes = Sequence[tuple[int, int]]


@frozen
class Wanted:
    """What a plan is wanted for; `Picture.plan` describes the parts."""

    demand: Demand
    shape: Shape
    keys: Sequence[bytes]
    prompt_key: bytes
    now: float
    suspects: Collection[str]
    at_decode: bool
    limit: Limit | None


class Planning:
    """Plans from the pools and the index.

    Args:
        index: who holds what.
        prefills: the prefill instances.
        decodes: the decode instances.
        stores: the kvstores; None = they do not count.
        threshold: see `PrefillModel`.
        peers: prefixes are loaded from other engine instances too.
        wishes: it is told which copy of a prefix a request would have gained from.
        rest_tokens: see `Rests`.
    """

    def __init__(
        self,
        index: PrefixIndex,
        prefills: Prefills,
        decodes: Decodes,
        stores: Stores | None,
        threshold: float,
        rest_tokens: int,
        peers: bool,
        wishes: bool,
    ) -> None:
        self._index = index
        self._prefills = prefills
        self._decodes = decodes
        self._stores = stores
        self._threshold = threshold
        self._rests = Rests(decodes, rest_tokens)
        self._wishes = wishes
        self._sources = Sources((prefills, decodes) if peers else (), stores)

    def plan(self, wanted: Wanted) -> Plan:
        """Plans a request.

        Raises:
            Unavailable: no instance that is large enough takes requests now.
            InvalidRequest: no instance that was ever here is large enough.
        """
        demand, keys, stores = wanted.demand, wanted.keys, self._stores
        prefixes = self._index.match(keys)
        views = stores.views(keys, wanted.prompt_key, prefixes) if stores is not None else []
        sources = self._sources.of(views, prefixes, lambda pool: pool.mask_of(wanted.suspects), wanted.now)
        model = PrefillModel(demand, wanted.shape, sources, self._threshold)
        candidates = self._prefill(wanted, self._prefills.soon(prefixes, keys), model)
        decodes = self._decode(wanted, prefixes) if demand.decode_tokens else []
        best = candidates[0]
        plan = Plan(
            prefill=best,
            decodes=tuple(decodes),
            sources=planned(sources, best.source, best.local_blocks, blocks_at(prefixes, self._index.slot(best.id))),
            write_back=stores.write_back(keys, wanted.prompt_key, views) if stores is not None else (),
            candidates=tuple(candidates),
            demand=demand,
            index_version=self._index.version,
            emulated=wanted.shape.emulated,
            send_s=self._send_s(best, decodes, prefixes, wanted) if decodes else 0.0,
            wish=self._wish(model, candidates, sources, wanted) if self._wishes and sources else None,
        )
        if not (decodes and wanted.at_decode and self._rests):
            return plan
        return self._rests.weigh(plan, wanted.shape, prefixes, wanted.suspects)

    def _prefill(self, wanted: Wanted, prefixes: Prefixes, model: PrefillModel) -> list[PrefillChoice]:
        demand, pool = wanted.demand, self._prefills
        choices = pool.choose(demand, model, prefixes, wanted.now, pool.mask_of(wanted.suspects), wanted.limit)
        if choices[0].excluded:
            if demand.prompt_blocks <= pool.largest_blocks:
                raise Unavailable(f"no prefill instance takes the prompt now ({choices[0].excluded})")
            raise InvalidRequest("prompt", f"no prefill instance can take it ({choices[0].excluded})")
        return choices

    def _send_s(
        self, best: PrefillChoice, decodes: Sequence[DecodeChoice], prefixes: Prefixes, wanted: Wanted
    ) -> float:
        """Seconds that the chosen instance's link has to do for the KV that the best decode instance lacks."""
        speeds = self._prefills.by_slot[self._index.slot(best.id)].learnt.speeds
        held = blocks_at(prefixes, self._index.slot(decodes[0].id)) * wanted.shape.block_tokens
        return transfer_seconds(speeds, max(0, wanted.demand.prompt_tokens - held) * wanted.shape.token_bytes)

    def _wish(
        self, model: PrefillModel, choices: Sequence[PrefillChoice], sources: Sequence[Source], wanted: Wanted
    ) -> Wish | None:
        """The instance whose first token would have come before that of the chosen one if it had the longest prefix."""
        source = max(sources, key=lambda it: it.blocks)
        found: list[tuple[float, str, PrefillChoice, Prefill]] = []
        for choice in choices:
            if not choice.excluded and choice.local_blocks < source.blocks:
                instance = self._prefills.by_slot[self._index.slot(choice.id)]
                facts, learnt = instance.facts, instance.learnt
                slowed = choice.factors.growing / learnt.factors.growing
                alone_s = model.alone_s(learnt.speeds, facts.stages, facts.step_tokens, source.blocks) * slowed
                ttft_s = choice.queue_s + choice.later_s + choice.overhead_s + alone_s
                found.append((ttft_s, choice.id, choice, instance))
        if not found:
            return None
        ttft_s, target, choice, instance = min(found)
        gain_s = choices[0].ttft_s - ttft_s
        if gain_s <= 0:
            return None
        block_bytes = wanted.shape.block_tokens * wanted.shape.token_bytes
        missing, cold = source.blocks - choice.local_blocks, source.cold_blocks(choice.local_blocks)
        read_s = source.read_s(source.rate(instance.learnt.speeds), missing * block_bytes, cold * block_bytes)
        return Wish(source.blocks, target, source.id, gain_s, read_s)

    def _decode(self, wanted: Wanted, prefixes: Prefixes) -> list[DecodeChoice]:
        demand, pool = wanted.demand, self._decodes
        choices = pool.choose(demand, DecodeModel(demand, wanted.shape), prefixes, pool.mask_of(wanted.suspects))
        if not choices:
            need = f"prompt and answer need {demand.total_blocks} KV blocks, no decode instance"
            if demand.total_blocks <= pool.largest_blocks:
                raise Unavailable(f"{need} with so many takes requests now")
            raise InvalidRequest("sampling.max_tokens", f"{need} has more than {pool.largest_blocks}")
        return choices
