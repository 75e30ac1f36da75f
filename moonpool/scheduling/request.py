"""What a scheduler knows of a request: counts, keys and owner, never tokens."""

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey


@frozen
class EngineRequest:
    """A request as the schedulers of prefill and decode see it. They carry this record unchanged.

    Attributes:
        keys: keys of the full blocks of `tokens`.
        tokens: tokens whose KV is computed, or transferred.
        prompt_tokens: length of the original prompt, at most `tokens`; the answer follows it.
        width: sequences that begin with these tokens and run together.
        logprob_bytes: bytes of log probabilities kept with each token of an answer.
        tenant: owner of its KV.
        priority: among the tenant's own requests; lower goes first.
        weight: the tenant's share, relative to others'.
        transient: no block of it may be kept: its KV was deleted while the request was on its way.
        token_cost: how many times as long as usual a prompt token takes: more if its log probabilities are wanted.
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
