"""What a request may ask of a decode instance at all, and the transfer that comes for it."""

from moonpool.engine.incoming import IncomingRequest
from moonpool.errors import InvalidRequest
from moonpool.kv.layout import KVLayout
from moonpool.streams.transfer import InboundTransfer
from services.decode.core.config import CoreConfig
from services.decode.core.groups import longest_blocks

MAX_GENERATION = (1 << 32) - 1


def sequence_lengths(incoming: IncomingRequest, config: CoreConfig, max_tokens: int) -> tuple[int, int]:
    """Tokens whose KV will come, and the longest that each of the request's sequences can become.

    Raises:
        InvalidRequest: it could never fit, or there is nothing to generate; names the field.
    """
    tokens, total = len(incoming.token_ids), incoming.sampling.total_tokens(max_tokens)
    if total <= tokens:
        raise InvalidRequest("sequence.sampling.max_tokens", "leaves no token to generate")
    if incoming.width > config.max_batch:
        field = "beam_width" if incoming.sampling.params.beam_width else "n"
        raise InvalidRequest(f"sequence.sampling.{field}", f"this instance has {config.max_batch} places in a step")
    needed = longest_blocks(config, incoming.sampling.prompt_tokens, total, incoming.width)
    if needed > config.num_blocks:
        have = f"this instance has {config.num_blocks}"
        raise InvalidRequest("sequence.sampling.max_tokens", f"needs {needed} blocks, {have}")
    return tokens, total


def inbound(number: int, layout: KVLayout, tokens: int, held: int) -> InboundTransfer:
    """The transfer of a request's KV, of which some leading blocks are held here."""
    blocks = layout.blocks_for(tokens)
    last = layout.valid_tokens(tokens, blocks - 1)
    return InboundTransfer(number, number % MAX_GENERATION + 1, layout, blocks, held, last)
