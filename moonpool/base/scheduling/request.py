"""What a scheduler knows about a request: counts, keys and owner, never tokens."""

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey


@frozen
class EngineRequest:
    """A request as the schedulers in prefill and decode see the request. They carry this record unchanged.

    Attributes:
        keys: keys for the full blocks in `tokens`.
        tokens: tokens whose KV is computed or transferred.
        prompt_tokens: the original prompt's length, at most `tokens`; the answer follows.
        width: sequences that begin with these tokens and run together.
        logprob_bytes: bytes for log probabilities kept with each answer token.
        tenant: the KV's owner.
        priority: among the tenant's own requests; lower goes first.
        weight: the tenant's share, relative to others'.
        transient: no block may be kept: the KV was deleted while the request was on the way.
        expected_tokens: length that the client expects of each answer; 0 = not told.
        pictures: where pictures stand in the prompt, [begin, end).
        token_cost: a prompt token's cost relative to a usual token: more if log probabilities are wanted.
    """

    keys: tuple[BlockKey, ...]
    tokens: int
    prompt_tokens: int
    width: int = 1
    logprob_bytes: int = 0
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    transient: bool = False
    token_cost: int = 1
    expected_tokens: int = 0
    pictures: tuple[tuple[int, int], ...] = ()
