"""A cluster told to a cluster by hand."""

from collections.abc import Sequence
from typing import Any

from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.decode_instance import DecodeInstanceState, PlacedAnswer
from moonpool.conductor.core.events import KeysChanged
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.prefill_corrections import PrefillCorrections
from moonpool.conductor.core.prefill_instance import PrefillInstanceState
from moonpool.conductor.core.routing import RoutingConfig, RoutingDecision, RoutingRequest

BLOCK_SIZE = 16
SHAPE = KVShape(block_size=BLOCK_SIZE, token_bytes=10, layers=1)
KINDS = {"prefill": InstanceKind.PREFILL, "decode": InstanceKind.DECODE, "kvstore": InstanceKind.KVSTORE}


def facts(name: str, **changes: Any) -> InstanceFacts:
    """Facts of an instance whose kind its name says, with a pool of 100 blocks."""
    kind = KINDS[name.split("-")[0]]
    shape = None if kind is InstanceKind.KVSTORE else SHAPE
    return InstanceFacts(**{"id": name, "epoch": 1, "kind": kind, "total_blocks": 100, "shape": shape, **changes})


ALONE = {"slow_factor": 0.0, "peers": False, "copy_share": 0.0, "prefetch_share": 0.0}
"""Settings with which prefixes come from kvstores only, and slow engines are used like others."""


class World:
    """A cluster, and instances that take whatever they are told to hold."""

    def __init__(self, *joined: InstanceFacts, **settings: Any) -> None:
        self.cluster = ClusterView(RoutingConfig(**{**ALONE, **settings}))
        self.sequences: dict[str, int] = {}
        for facts in joined:
            self.join(facts)

    def join(self, facts: InstanceFacts, now: float = 0.0) -> None:
        self.cluster.join(facts, now)
        self.cluster.keys_changed(KeysChanged(facts.id, 0, (), (), snapshot_begin=True, snapshot_end=True))
        self.sequences[facts.id] = 1

    def events(
        self, name: str, stored: Sequence[bytes], removed: Sequence[bytes] = (), cooled: Sequence[bytes] = ()
    ) -> None:
        keys = tuple(stored), tuple(removed)
        event = KeysChanged(name, self.sequences[name], *keys, False, False, tuple(cooled))
        self.cluster.keys_changed(event)
        self.sequences[name] += 1

    def report(self, name: str, now: float = 0.0, **load: Any) -> None:
        self.cluster.report(name, LoadFacts(**load), now)

    def plan(self, tokens: int = 64, **changes: Any) -> RoutingDecision:
        asked: dict[str, Any] = {
            "tokens": tokens,
            "answer_tokens": 8,
            "keys": [],
            "prompt_key": b"prompt",
            "now": 0.0,
            **changes,
        }
        plan = self.cluster.plan(RoutingRequest(**asked))
        if len(self.cluster.index) < 100:
            self.cluster.check_invariants()
        return plan

    def serve(self, now: float = 0.0, **changes: Any) -> tuple[str, str]:
        """Places a request; returns where."""
        plan = self.plan(now=now, **changes)
        self.cluster.claim_prefill(plan.prefill.id, plan.prefill.busy_s, now)
        self.cluster.claim_decode(plan.decodes[0].id, PlacedAnswer(plan.demand.prompt_tokens, plan.decodes[0].blocks))
        return plan.prefill.id, plan.decodes[0].id


SECOND_PER_TOKEN = Speeds(prefill_per_token_s=1.0, load_bytes_per_s=100.0, transfer_bytes_per_s=100.0)


def prefill_at(slot: int, facts: InstanceFacts, free_at: float) -> PrefillInstanceState:
    return PrefillInstanceState(facts, slot, PrefillCorrections(facts.speeds), free_at)


def decode_at(slot: int, facts: InstanceFacts, sequences: int, *, room: int) -> DecodeInstanceState:
    load = LoadFacts(running=sequences, context_tokens=100 * sequences, free_blocks=room)
    return DecodeInstanceState(facts, slot, facts.speeds, load)
