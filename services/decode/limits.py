"""What a request may ask of a decode instance at all."""

from moonpool.engine.incoming import IncomingRequest
from moonpool.errors import InvalidRequest
from services.decode.core.config import CoreConfig
from services.decode.core.groups import longest_blocks


def sequence_lengths(incoming: IncomingRequest, config: CoreConfig, max_tokens: int) -> tuple[int, int]:
    """Tokens whose KV will come, and the longest that each of the request's sequences can become.

    Raises:
        InvalidRequest: it could never fit, or there is nothing to generate; names the field.
    """
    tokens, total = len(incoming.token_ids), incoming.sampling.total_tokens(max_tokens)
    if total <= tokens:
        raise InvalidRequest("sequence.sampling.max_tokens", "leaves no token to generate")
    if incoming.choices > config.max_batch:
        raise InvalidRequest("sequence.sampling.n", f"this instance has {config.max_batch} places in a step")
    needed = longest_blocks(config, incoming.sampling.prompt_tokens, total, incoming.choices)
    if needed > config.num_blocks:
        have = f"this instance has {config.num_blocks}"
        raise InvalidRequest("sequence.sampling.max_tokens", f"needs {needed} blocks, {have}")
    return tokens, total
