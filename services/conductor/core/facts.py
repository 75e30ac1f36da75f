"""What the conductor is told: who an instance is, its load, and what a request needs. Plain values."""

from dataclasses import field
from enum import Enum

from moonpool.cost import Speeds
from moonpool.frozen import frozen


class Kind(Enum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"


@frozen
class Shape:
    """Sizes of the KV that is served. `emulated`: compute is emulated, all engines alike."""

    block_tokens: int
    token_bytes: int
    layers: int
    emulated: bool = False

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_tokens)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Tokens of a prompt that need not be computed where its leading blocks are.

        The last token always is, as its logits are wanted.
        """
        return min(blocks * self.block_tokens, tokens - 1)

    def blocks_for_choices(self, tokens: int, answer_tokens: int, choices: int) -> int:
        """Blocks of `choices` answers that share the full blocks of the `tokens` they begin with."""
        shared = tokens // self.block_tokens
        return shared + choices * (self.blocks_for(tokens + answer_tokens) - shared)


@frozen
class InstanceFacts:
    """An instance as it joins.

    Attributes:
        id: stable name.
        incarnation: changes at every start.
        kind: what it does.
        total_blocks: of its pool.
        shape: of an engine's KV; None for a kvstore.
        speeds: first ones.
        stages: of a prefill instance's pipeline; so many steps overlap.
        step_tokens: a prefill step computes at most; 0 = a whole prompt.
        capacity_bytes: of a kvstore; 0 = not known.
        either: an engine that comes back in the other role when it is ordered to.
        host: of its address: engines of one host may slow each other down; empty = not known.
        tells_cold: a kvstore that tells which of its blocks are on SSD only.
    """

    id: str
    incarnation: int
    kind: Kind
    total_blocks: int
    shape: Shape | None = None
    speeds: Speeds = field(default_factory=Speeds)
    stages: int = 1
    step_tokens: int = 0
    capacity_bytes: int = 0
    either: bool = False
    host: str = ""
    tells_cold: bool = False


@frozen
class LoadFacts:
    """A load report.

    Attributes:
        running, waiting: requests, or sessions of a kvstore.
        free_blocks, cached_blocks, promised_blocks: of the pool; `promised_blocks` are free or cached and spoken for.
        context_tokens: of all running sequences (decode).
        drain_s: predicted seconds until all prompts that are there are computed (prefill); None = not told.
        speeds: measured; None = as before.
        draining: takes no new requests.
        taken: prompts or promises so far: those numbered up to it are included (`Picture.known`).
        answer_tokens: that a new answer is expected to have, for which room is kept (decode); 0 = not told.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    promised_blocks: int = 0
    context_tokens: int = 0
    drain_s: float | None = None
    speeds: Speeds | None = None
    draining: bool = False
    taken: int = 0
    answer_tokens: int = 0


@frozen
class Demand:
    """What a request needs.

    `prompt_blocks` is room for the prompt at prefill, `total_blocks` for prompt and longest answers at decode;
    `decode_tokens` are the tokens that decode is expected to make, in each of `choices` answers.
    """

    prompt_tokens: int
    prompt_blocks: int
    total_blocks: int
    decode_tokens: int
    choices: int = 1
