"""An instance of any kind, as it is when it joins."""

from services.conductor.core.corrections import Corrections
from services.conductor.core.decodes import Decode
from services.conductor.core.facts import InstanceFacts, Kind, LoadFacts
from services.conductor.core.prefills import Prefill
from services.conductor.core.stores import Store

Instance = Prefill | Decode | Store


def instance_of(facts: InstanceFacts, now: float) -> Instance:
    """The instance, idle since `now`, not in any pool yet."""
    match facts.kind:
        case Kind.PREFILL:
            emulated = facts.shape is not None and facts.shape.emulated
            return Prefill(facts, -1, Corrections(facts.speeds, alone=emulated), now)
        case Kind.DECODE:
            load = LoadFacts(free_blocks=facts.total_blocks)
            return Decode(facts, -1, facts.speeds, load)
        case Kind.KVSTORE:
            return Store(facts, -1)
