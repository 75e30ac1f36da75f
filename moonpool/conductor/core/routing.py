"""What the router needs of a request, and what the router answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import QueueKey, priority_rank
from moonpool.base.settings import setting
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.prefill_pool import PromptToPlace, TtftLimit
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.core.replication import ReplicationHint
from moonpool.conductor.core.store_pool import MAX_REPLICAS, RowsPlace, StoreView
from moonpool.conductor.placement.base import (
    DecodeChoice,
    DecodePolicy,
    PlacementPolicy,
    PlacementRequest,
    PrefillChoice,
    SessionFacts,
)
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY
from moonpool.conductor.placement.policies import DEFAULT_POLICY, POLICIES

EXPECTED_ANSWER_TOKENS = 256
"""Most answers are shorter than their limit: decode instances are compared for this many tokens at most."""
NO_KEY = QueueKey("", 0.0, 0)


@frozen
class RoutingConfig:
    """How requests are routed.

    Attributes:
        balancing_threshold: a prefix elsewhere counts if this many times longer than the instance's own (the paper's
            kvcache_balancing_threshold). With 1 each longer prefix counts: the predicted costs decide (ADR 16).
        policy: chooses prefill instances.
        decode_policy: orders decode instances.
        shadow_policy: decides beside `policy` without acting; None = none does.
        seed: for the policy's random draws.
    """

    balancing_threshold: float = 1.0
    kvstore_replicas: int = setting(
        1,
        "kvstores that hold a copy of each prefix, where there are that many; with 2, losing one loses no KV, and a "
        "hot prefix is read from both",
        ge=1,
        le=MAX_REPLICAS,
    )
    policy: PlacementPolicy = POLICIES[DEFAULT_POLICY]
    decode_policy: DecodePolicy = DECODE_POLICIES[DEFAULT_DECODE_POLICY]
    shadow_policy: PlacementPolicy | None = None
    seed: int = 0
    decode_prompt_tokens: int = setting(
        1 << 20,
        "a decode instance computes what it lacks of a prompt, this many tokens at most, if that is predicted to be "
        "quicker, counting the cost for other requests; 0 = never; docs/placement.md",
        ge=0,
    )
    slow_factor: float = setting(
        6.0,
        "an engine that measures itself this many times slower than usual gets no new requests and hands running ones "
        "over, while another engine is well; 0 = slow engines are used like others",
        ge=0,
    )
    peers: bool = setting(
        True,
        "prefixes are loaded from the pools of other prefill and decode instances too, not only from kvstores; "
        "docs/placement.md",
    )
    copy_share: float = setting(
        0.1,
        "share of an instance's link, in each direction, that copies of hot prefixes may take; 0 = no copies are "
        "ordered, and a prefix spreads only by being loaded",
        ge=0,
        le=1,
    )
    prefetch_share: float = setting(
        0.5,
        "share of an instance's link, in each direction, that may bring blocks into prefill instances before expected "
        "prompts come; 0 = blocks are brought into kvstores' memory only; docs/placement.md",
        ge=0,
        le=1,
    )


DEFAULT_ROUTING = RoutingConfig()


@frozen
class RoutingRequest:
    """A request for which instances are chosen.

    Attributes:
        tokens: to compute: the prompt and, of a continued answer, the tokens generated before.
        answer_tokens: still to be generated; with 1, prefill alone can serve the request.
        keys: keys for all full blocks of `tokens`.
        prompt_key: hash of the prompt; chooses the kvstore if there is no full block.
        now: time, seconds.
        suspects: ids of instances that failed the request before; used only if no other is left.
        full: ids of instances in the role both that had no place for the request; likewise.
        choices: answers to generate.
        at_decode: decode may compute the rest of the prompt.
        ttft_limit: beyond which the request is refused; None = not running.
        limit_s: seconds from now within which the client wants the first token; None = not told.
        priority: among the tenant's requests.
        queue_key: position among waiting requests, by arrival at the conductor.
        needs: sampling options that the instances must have.
        session: what is known of the request's session.
        expected_tokens: of `answer_tokens`, those that the client expects of each answer; 0 = not told.
        pictures: where pictures stand in the prompt, [begin, end).
        row_keys: for each picture, the key of the first block of its encoded rows.
    """

    tokens: int
    answer_tokens: int
    keys: Sequence[bytes]
    prompt_key: bytes
    now: float
    suspects: Collection[str] = ()
    full: Collection[str] = ()
    choices: int = 1
    at_decode: bool = False
    ttft_limit: TtftLimit | None = None
    limit_s: float | None = None
    priority: int = 0
    queue_key: QueueKey = NO_KEY
    needs: tuple[str, ...] = ()
    session: SessionFacts | None = None
    expected_tokens: int = 0
    pictures: tuple[tuple[int, int], ...] = ()
    row_keys: tuple[bytes, ...] = ()

    def to_place(self, demand: Demand) -> PromptToPlace:
        """Return the prompt on arrival at an instance now."""
        key = self.queue_key
        there = QueueKey(key.tenant, priority_rank(self.now, self.priority), key.number, key.weight)
        return PromptToPlace(self.placed(demand), there, self.ttft_limit)

    def placed(self, demand: Demand) -> PlacementRequest:
        """Return what policies see of the request."""
        tenant, priority, limit_s = self.queue_key.tenant, self.priority, self.limit_s
        blocks, tokens = demand.prompt_blocks, demand.decode_tokens
        return PlacementRequest(demand.prompt_tokens, blocks, tokens, tenant, priority, limit_s, self.session)

    def demand(self, shape: KVShape, rows: Sequence[RowsPlace | None] = ()) -> Demand:
        """Return the blocks and tokens that the request needs; `rows`: where its encoded pictures are kept."""
        held = [row is not None and row.held for row in rows] or [False] * len(self.pictures)
        return Demand(
            prompt_tokens=self.tokens,
            prompt_blocks=shape.blocks_for(self.tokens),
            total_blocks=shape.blocks_for_choices(self.tokens, self.answer_tokens, self.choices),
            decode_tokens=min(self.answer_tokens - 1, self.expected_tokens or EXPECTED_ANSWER_TOKENS),
            choices=self.choices,
            needs=self.needs,
            expected_tokens=min(self.answer_tokens, self.expected_tokens),
            pictures=tuple(place for place, there in zip(self.pictures, held, strict=True) if not there),
            encoded=tuple(place for place, there in zip(self.pictures, held, strict=True) if there),
        )


@frozen
class RoutingDecision:
    """Where a request goes, best first.

    Attributes:
        prefill: the best of `candidates`.
        decodes: a few, best first; empty if decode is not needed.
        sources: the prefix is loaded from the first of them that answers.
        write_back: kvstores that shall hold the chain.
        candidates: the best prefill instances, then some that cannot be used.
        demand: what the request needs.
        index_version: version of the prefix index behind the decision, for `ClusterView.forget`.
        emulated: compute is emulated.
        at_decode: the single decode instance computes what it lacks of the prompt; `prefill` predicts that.
        both: the chosen instance is in the role both: it computes the prompt, and decodes.
        hint: the copy of a prefix from which the request would have gained; None = none, or copies are off.
        send_s: predicted seconds of sending the KV that decode lacks.
        rows: for each picture of the prompt, where its encoded rows are kept; None = nowhere, or nobody encodes it.
    """

    prefill: PrefillChoice
    decodes: tuple[DecodeChoice, ...]
    sources: tuple[PrefixHolder, ...]
    write_back: tuple[StoreView, ...]
    candidates: tuple[PrefillChoice, ...]
    demand: Demand
    index_version: int
    emulated: bool = False
    at_decode: bool = False
    both: bool = False
    hint: ReplicationHint | None = None
    send_s: float = 0.0
    rows: tuple[RowsPlace | None, ...] = ()

    @property
    def computed_at_decode(self) -> bool:
        """Whether no prefill instance is called."""
        return self.at_decode or self.both
