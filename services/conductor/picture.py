"""The core's picture of the cluster, drawn by planner, registry and index."""

from collections.abc import Sequence

from moonpool.errors import MoonpoolError
from services.conductor.core.failures import Failure
from services.conductor.core.plan import Candidate, DecodeOption, Demand, Plan, Prefilled, StoreOption
from services.conductor.index import PrefixIndex
from services.conductor.placement import PrefillChoice
from services.conductor.planner import Plan as Planned
from services.conductor.planner import Planner
from services.conductor.registry import DECODE, PREFILL, Member, Registry
from services.conductor.translate import failure_of


class PlannerPicture:
    """See `services.conductor.core.plan.Picture`."""

    def __init__(self, registry: Registry, index: PrefixIndex, planner: Planner) -> None:
        self._registry = registry
        self._index = index
        self._planner = planner
        self._claims: dict[int, tuple[Member, Member | None]] = {}

    def plan(self, demand: Demand, now: float) -> Plan | Failure:
        """The planner's plan, or why there is none."""
        try:
            planned = self._planner.plan(
                tokens=demand.tokens,
                answer_tokens=demand.answer_tokens,
                keys=demand.keys,
                prompt_key=demand.prompt_key,
                now=now,
                suspects=demand.suspects,
            )
        except MoonpoolError as error:
            return failure_of(error)
        return self._plain(planned)

    def claim_prefill(self, claim: int, plan: Plan, now: float) -> None:
        """Counts on the member, and on the kvstore."""
        member = self._registry.get(plan.prefill)
        assert member is not None, "planned an instance that is not there"
        self._registry.placed(member)
        member.prefills.begin(str(claim), plan.busy_s, now)
        source = self._registry.get(plan.kvstore) if plan.kvstore else None
        if source is not None:
            source.loads.add(str(claim))
        self._claims[claim] = member, source

    def claim_decode(self, claim: int, decode: str, plan: Plan, now: float) -> None:
        """Counts on the member, if it is there."""
        member = self._registry.get(decode)
        if member is not None:
            member.decodes.begin(str(claim), plan.prompt_tokens, plan.total_blocks)
            self._registry.placed(member)
            self._claims[claim] = member, None

    def release(self, claim: int, now: float) -> None:
        """Stops counting."""
        member, source = self._claims.pop(claim, (None, None))
        if member is not None:
            member.prefills.end(str(claim), now)
            member.decodes.end(str(claim))
        if source is not None:
            source.loads.discard(str(claim))

    def prefilled(self, plan: Plan, how: Prefilled) -> None:
        """Corrects the member's speeds, and the index."""
        member = self._registry.get(plan.prefill)
        if member is not None and not how.loaded_tokens:
            member.tracker.observe_prefill(how.computed_tokens, how.local_tokens, how.prefill_s)
        for store, key in how.misses:
            self._index.forget(store, [key], plan.index_version)

    def room_of(self, decode: str) -> tuple[int, int]:
        """By its last report and what was promised since."""
        member = self._registry.get(decode)
        if member is None or member.kind != DECODE or member.load.draining:
            return 0, 0
        load = member.load
        room = load.free_blocks + load.cached_blocks - load.promised_blocks
        return room - member.decodes.total_unreported_blocks(), member.total_blocks

    def only(self, suspects: Sequence[str]) -> bool:
        """Whether nobody else is there."""
        members = [self._registry.of_kind(kind) for kind in (PREFILL, DECODE)]
        return any(all(member.id in suspects for member in same) for same in members)

    def _plain(self, planned: Planned) -> Plan:
        best, total = planned.prefill, planned.demand.total_blocks
        decodes = []
        for choice in planned.decodes:
            member = self._registry.get(choice.id)
            assert member is not None, "planned an instance that is not there"
            fits = self.room_of(choice.id)[0] >= total
            decodes.append(DecodeOption(choice.id, member.instance.incarnation, choice.tbt_s, fits))
        prefill = self._registry.get(best.id)
        assert prefill is not None, "planned an instance that is not there"
        return Plan(
            prefill=best.id,
            incarnation=prefill.instance.incarnation,
            ttft_s=best.ttft_s,
            busy_s=best.busy_s,
            used_blocks=best.used_blocks,
            kvstore=best.kvstore,
            decodes=tuple(decodes),
            total_blocks=total,
            prompt_tokens=planned.demand.prompt_tokens,
            sources=tuple(StoreOption(view.id, view.blocks) for view in planned.sources),
            write_back=tuple(StoreOption(view.id, view.blocks) for view in planned.write_back),
            candidates=tuple(map(_candidate, planned.candidates)),
            index_version=planned.index_version,
            emulated=planned.emulated,
        )


def _candidate(choice: PrefillChoice) -> Candidate:
    return Candidate(
        choice.id,
        choice.local_blocks,
        choice.used_blocks,
        choice.queue_s,
        choice.load_s,
        choice.prefill_s,
        choice.excluded,
    )
