"""What a placement is predicted to take: Algorithm 1 of the Mooncake paper, with a choice of loading or recomputing.

As in Algorithm 1 a prefix in a kvstore is considered only when it is longer than the instance's own by a factor
(`threshold`); unlike there it is used only when loading it is predicted to be quicker than recomputing it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from moonpool.cost import (
    Speeds,
    decode_step_seconds,
    load_seconds,
    overlapped_seconds,
    pipelined_seconds,
    prefill_seconds,
    transfer_seconds,
)
from services.conductor.core.facts import Demand, Shape
from services.conductor.core.stores import StoreView


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """The prediction for one prefill instance, seconds; `excluded` says why it cannot be used.

    `load_s` is what computing does not hide of loading. `busy_s` is how much later the next prompt begins for this
    one: less than its own time where stages overlap.
    """

    id: str
    local_blocks: int
    used_blocks: int
    queue_s: float
    load_s: float
    prefill_s: float
    busy_s: float
    kvstore: str = ""
    excluded: str = ""

    @property
    def alone_s(self) -> float:
        """Predicted time to first token on an idle instance."""
        return self.load_s + self.prefill_s

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.queue_s + self.alone_s


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """The prediction for one decode instance: seconds between tokens, and seconds until the request is done there."""

    id: str
    tbt_s: float
    finish_s: float


class PrefillCost(NamedTuple):
    """Seconds of one prompt on an idle instance, and what it uses of its prefix."""

    load_s: float
    prefill_s: float
    busy_s: float
    used_blocks: int
    kvstore: str

    @property
    def alone_s(self) -> float:
        """Time to first token."""
        return self.load_s + self.prefill_s


class PrefillModel:
    """Predicts one request's prompt on any instance.

    Args:
        demand: of the request.
        shape: of the KV.
        store: the kvstore to read from, if there is one.
        threshold: a stored prefix must be so many times longer than the instance's own.
    """

    def __init__(self, demand: Demand, shape: Shape, store: StoreView | None, threshold: float) -> None:
        self._tokens = demand.prompt_tokens
        self._shape = shape
        self._store = store
        self._threshold = threshold

    def cost(self, speeds: Speeds, stages: int, step_tokens: int, local_blocks: int) -> PrefillCost:
        """The prediction for an instance of these speeds that holds `local_blocks` leading blocks itself."""
        shape, store = self._shape, self._store
        # The last token is always computed: its logits are wanted.
        local = min(local_blocks * shape.block_tokens, self._tokens - 1)
        compute_s = self._compute_s(speeds, step_tokens, local)
        if store is not None and store.blocks > local_blocks and store.blocks > self._threshold * local_blocks:
            stored = min(store.blocks * shape.block_tokens, self._tokens - 1)
            rest_s = self._compute_s(speeds, step_tokens, stored)
            load_s = load_seconds(speeds, (stored - local) * shape.token_bytes)
            both_s = overlapped_seconds(load_s, rest_s, shape.layers)
            if stored > local and both_s < compute_s:
                own_s = self._pipelined(rest_s, stages, step_tokens, stored)
                hidden_s = overlapped_seconds(load_s, own_s, shape.layers) - own_s
                return PrefillCost(hidden_s, own_s, max(rest_s / stages, load_s), store.blocks, store.id)
        own_s = self._pipelined(compute_s, stages, step_tokens, local)
        return PrefillCost(0.0, own_s, compute_s / stages, local_blocks, "")

    def _compute_s(self, speeds: Speeds, step_tokens: int, prefix: int) -> float:
        new = self._tokens - prefix
        return prefill_seconds(speeds, new, prefix, steps=steps_of(new, step_tokens))

    def _pipelined(self, compute_s: float, stages: int, step_tokens: int, prefix: int) -> float:
        if stages == 1:
            return compute_s
        return pipelined_seconds(compute_s, steps=steps_of(self._tokens - prefix, step_tokens), stages=stages)


def steps_of(tokens: int, step_tokens: int) -> int:
    """Steps that so many tokens take; 0 tokens a step = all in one."""
    return -(-tokens // step_tokens) if step_tokens else 1


class DecodeModel:
    """Predicts one request's answer on any decode instance."""

    def __init__(self, demand: Demand, shape: Shape) -> None:
        self._demand = demand
        self._shape = shape

    def fixed_s(self, speeds: Speeds, held_blocks: int) -> float:
        """Seconds of the request on an idle instance: receiving the KV it lacks, and its own share of steps."""
        demand, shape = self._demand, self._shape
        held = min(held_blocks * shape.block_tokens, demand.prompt_tokens)
        receive_s = transfer_seconds(speeds, (demand.prompt_tokens - held) * shape.token_bytes)
        return receive_s + demand.decode_tokens * self._step_s(speeds)

    def _step_s(self, speeds: Speeds) -> float:
        """Seconds of a step of this request alone."""
        demand = self._demand
        return decode_step_seconds(speeds, demand.choices, demand.prompt_tokens * demand.choices)

    def load_s(self, step_load_s: float) -> float:
        """Seconds added by what runs there already, which makes each step longer by `step_load_s`."""
        return self._demand.decode_tokens * step_load_s

    def choice(self, name: str, speeds: Speeds, sequences: int, context_tokens: int, held_blocks: int) -> DecodeChoice:
        """The prediction for an instance with this load."""
        load_s = step_load_s(speeds, sequences, context_tokens)
        tbt_s = load_s + self._step_s(speeds)
        return DecodeChoice(name, tbt_s, self.fixed_s(speeds, held_blocks) + self.load_s(load_s))


def step_load_s(speeds: Speeds, sequences: int, context_tokens: int) -> float:
    """Seconds that what runs on a decode instance adds to each step."""
    return speeds.decode_per_sequence_s * sequences + speeds.decode_per_context_token_s * context_tokens
