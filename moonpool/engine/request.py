"""Requests of an engine instance: checked, unpacked, and read in a thread if they are long.

Every accepted request is safe to compute: the model has every token id.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

from moonpool.base.cluster.proto_conversion import media_from_proto
from moonpool.base.contracts import sampling_from_proto
from moonpool.base.errors import InvalidRequest, Overloaded, Unavailable
from moonpool.base.kv.keys import MAX_SALT_CHARS, BlockKey, chain_root, pack_keys, tokens_from_bytes
from moonpool.base.kv.media import MediaItem, overlapping
from moonpool.base.kv.native_library import chain_keys, tokens_below
from moonpool.base.logprobs import bytes_per_token
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.files import Picture, PictureFiles
from moonpool.base.pictures.rule import check_pictures, grid_of, with_pictures
from moonpool.base.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_SUPPRESSED_TOKENS, SCORED_TOKEN_COST
from moonpool.base.scheduling.fair_share import check_priority
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.steps import PlacedPicture, SequenceSampling, TokenHistory
from moonpool.base.scheduling.thinking import MAX_MARK_TOKENS, ThinkingBudget
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.v1 import kv_pb2

MAX_NAME_CHARS = 256
MAX_END_TOKENS = 4096
MAX_BAD_TOKENS = 2 * MAX_BAD_WORDS
TOKEN_BYTES = 4
LORA_ID_BYTES = 32
MAX_PENDING_READS = 1024
MAX_LOOKED_AT = 1024
"""Digests of pictures that are known to be whole."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestRows:
    """The rows of one request's pictures.

    Attributes:
        known: rows from kvstores, by digest, until a step takes them.
        wanted: where rows shall go once they are encoded, by digest.
        placed: is told of each picture that a step has put into the prompt.
        given: is told how many bytes of `known` a step has taken.
        seconds: that reading has taken.
        tokens: of the pictures that were read.
    """

    known: dict[bytes, bytes]
    wanted: Mapping[bytes, kv_pb2.Instance]
    placed: Callable[[PlacedPicture], None]
    given: Callable[[int], None]
    seconds: float = 0.0
    tokens: int = 0

    def for_step(self, media: Sequence[MediaItem]) -> dict[bytes, bytes]:
        """Return what a step with these pictures is told (`SequenceStep.picture_rows`); rows are told once."""
        told = {item.digest: b"" for item in media if item.digest in self.wanted}
        found = {item.digest: self.known.pop(item.digest) for item in media if item.digest in self.known}
        self.given(sum(map(len, found.values())))
        return told | found

    def computed(self, index: int, pictures: Sequence[PlacedPicture]) -> None:
        """A step is over; `index`: the sequence's there."""
        for picture in pictures:
            if picture.index == index:
                self.placed(picture)


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A checked request.

    Attributes:
        request_id: the request's id.
        token_ids: tokens with wanted KV; typecode "i".
        chain_root: parent of the first key.
        sampling: how the next tokens are chosen.
        spec: the part that schedulers see.
        lora: id of the LoRA adapter; b"" = the base model.
        media: pictures in the prompt, in order.
        rope_shifts: M-RoPE: ends of pictures, and by how much the positions behind them differ from the tokens' places.
        rows: encoded rows of the pictures, where kvstores keep such; None = they do not.
    """

    request_id: str
    token_ids: "array[int]"
    chain_root: BlockKey
    sampling: SequenceSampling
    spec: EngineRequest
    lora: bytes = b""
    media: tuple[MediaItem, ...] = ()
    rope_shifts: tuple[tuple[int, int], ...] = ()
    rows: RequestRows | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_proto(
        cls,
        spec: kv_pb2.SequenceSpec,
        *,
        namespace: bytes,
        block_size: int,
        vocab_size: int,
        max_tokens: int,
        takes_media: bool = False,
    ) -> Self:
        """From the contract. Keys are computed here: a block under a wrong key would be a wrong answer later.

        `takes_media`: whether pictures can be computed here; else prompts with pictures are refused.

        Raises:
            InvalidRequest: naming the field at fault.
        """
        _check_name("sequence.request_id", spec.request_id, least=1)
        _check_name("sequence.tenant", spec.tenant, least=0)
        if len(spec.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequest("sequence.cache_salt", f"at most {MAX_SALT_CHARS} characters")
        check_priority(spec.priority, "sequence.priority")
        weight = spec.weight or 1.0
        if not 0.0 < weight < inf:
            raise InvalidRequest("sequence.weight", f"must be above 0, is {weight}")
        # Sizes come first: a request refused for its size is neither copied nor unpacked.
        if not TOKEN_BYTES <= len(spec.token_ids) <= TOKEN_BYTES * max_tokens:
            raise InvalidRequest("sequence.token_ids", f"must be 1 to {max_tokens} tokens")
        if len(spec.end_token_ids) > min(vocab_size, MAX_END_TOKENS):
            raise InvalidRequest("sequence.end_token_ids", f"at most {min(vocab_size, MAX_END_TOKENS)} tokens")
        params = sampling_from_proto(spec.sampling, "sequence.sampling").suggested({})
        params.check(vocab_size, "sequence.sampling")
        ends = frozenset(spec.end_token_ids).union(params.stop_token_ids)
        params.check_end_tokens(ends, vocab_size, "sequence.end_token_ids", "sequence.sampling")
        tokens = tokens_from_bytes(spec.token_ids, "sequence.token_ids")
        if not tokens_below(spec.token_ids, vocab_size):
            raise InvalidRequest("sequence.token_ids", f"must be in [0, {vocab_size})")
        if not 1 <= spec.prompt_tokens <= len(tokens):
            raise InvalidRequest("sequence.prompt_tokens", f"must be in [1, {len(tokens)}], is {spec.prompt_tokens}")
        lora = spec.lora.id
        if spec.HasField("lora") and len(lora) != LORA_ID_BYTES:
            raise InvalidRequest("sequence.lora.id", f"must have {LORA_ID_BYTES} bytes, has {len(lora)}")
        root = chain_root(namespace, spec.tenant, spec.cache_salt, lora)
        if spec.chain_root != root:
            raise InvalidRequest("sequence.chain_root", "is not that of this namespace, tenant, salt and adapter")
        media = media_from_proto(spec.media, "sequence.media", spec.prompt_tokens)
        if media and not takes_media:
            raise InvalidRequest("sequence.media", "this engine takes no pictures")
        keys = chain_keys(root, spec.token_ids, block_size, media)
        if spec.block_keys != pack_keys(keys):
            raise InvalidRequest("sequence.block_keys", f"are not the {len(keys)} keys of these tokens")
        suppressed = _suppressed(spec, ends, vocab_size)
        bad_tokens = _bad_tokens(spec, len(ends) + len(suppressed), vocab_size)
        if bad_tokens and params.response_format:
            raise InvalidRequest("sequence.bad_tokens", "has no meaning with response_format, which says what may come")
        thinking = _thinking(spec, vocab_size)
        places = tuple((item.begin, item.end) for item in media)
        sampling = SequenceSampling.of(
            params,
            spec.prompt_tokens,
            spec.end_token_ids,
            bad_tokens,
            thinking,
            suppressed,
            places,
        )
        seen = EngineRequest(
            tuple(keys),
            len(tokens),
            spec.prompt_tokens,
            width=params.width,
            logprob_bytes=bytes_per_token(params.logprobs),
            tenant=spec.tenant,
            priority=spec.priority,
            weight=weight,
            transient=spec.transient,
            expected_tokens=spec.expected_output_tokens,
            token_cost=1 if params.prompt_logprobs is None else SCORED_TOKEN_COST,
            pictures=places,
        )
        return cls(spec.request_id, tokens, BlockKey(root), sampling, seen, lora, media)

    def history(self, token_ids: "array[int] | None" = None) -> TokenHistory:
        """For engines that check what blocks hold; `token_ids` = the array that grows with the answer, if one does."""
        tokens = self.token_ids if token_ids is None else token_ids
        return TokenHistory(self.chain_root, tokens, self.spec.keys, self.media)

    def with_checked_pictures(self, rule: PictureRule) -> Self:
        """Check that each picture has the tokens and the digest that the model's rule gives it; learn their positions.

        Raises:
            InvalidRequest: one has others; names `sequence.media`.
        """
        shifts: list[tuple[int, int]] = []
        for item in self.media:
            picture = Picture(item.content, item.width, item.height, item.detail)
            check_pictures("sequence.media", [picture])
            _, (right,) = with_pictures("sequence.media", rule, [rule.mark], [picture])
            grid = grid_of("sequence.media", rule, picture)
            tokens = rule.tokens(grid)
            if self.token_ids[item.begin : item.end] != array("i", tokens) or item.digest != right.digest:
                raise InvalidRequest("sequence.media", "tokens or digest are not those of the picture")
            if rule.components:
                shifts.append((item.end, max(grid) - len(tokens)))
        return replace(self, rope_shifts=tuple(shifts)) if shifts else self

    def rope_shift(self, position: int) -> int:
        """Return what RoPE's position of a token is behind its own, or that of the picture in which the token lies."""
        return sum(shift for end, shift in self.rope_shifts if end <= position) if self.rope_shifts else 0

    def media_in(self, start: int, end: int) -> tuple[MediaItem, ...]:
        """Return the pictures with tokens at the positions [start, end)."""
        return tuple(overlapping(self.media, start, end)) if self.media else ()

    def rows_for(self, media: Sequence[MediaItem]) -> Mapping[bytes, bytes]:
        """Return `SequenceStep.picture_rows` of a step that computes these of the pictures."""
        return self.rows.for_step(media) if self.rows is not None and media else {}

    def parents(self) -> list[BlockKey]:
        """For each of the request's keys, the key before in the chain."""
        return [self.chain_root, *self.spec.keys][: len(self.spec.keys)]


def _bad_tokens(spec: kv_pb2.SequenceSpec, ends: int, vocab_size: int) -> list[Sequence[int]]:
    """Checked, also that something can be chosen whatever they ban."""
    field, most = "sequence.bad_tokens", min(MAX_BAD_TOKENS, vocab_size - ends - 1)
    if len(spec.bad_tokens) > max(0, most):
        raise InvalidRequest(field, f"at most {most}")
    runs = [run.token_ids for run in spec.bad_tokens]
    if not all(0 < len(run) <= MAX_BAD_WORD_CHARS + 1 for run in runs):
        raise InvalidRequest(field, f"each has 1 to {MAX_BAD_WORD_CHARS + 1} tokens")
    if not all(0 <= token < vocab_size for run in runs for token in run):
        raise InvalidRequest(field, f"token ids must be in [0, {vocab_size})")
    return [tuple(run) for run in runs]


def _suppressed(spec: kv_pb2.SequenceSpec, ends: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    """Checked tokens that are never chosen: others are left."""
    field, tokens = "sequence.suppressed_token_ids", spec.suppressed_token_ids
    if len(tokens) > max(0, min(MAX_SUPPRESSED_TOKENS, vocab_size - len(ends) - 1)):
        raise InvalidRequest(field, f"{len(tokens)} are too many")
    if not all(0 <= token < vocab_size for token in tokens):
        raise InvalidRequest(field, f"token ids must be in [0, {vocab_size})")
    return tuple(tokens)


def _thinking(spec: kv_pb2.SequenceSpec, vocab_size: int) -> ThinkingBudget | None:
    """The checked budget of the answer's thinking; None = none."""
    if not spec.HasField("thinking"):
        return None
    budget = spec.thinking
    for name in ("begin_token_ids", "end_token_ids"):
        field, tokens = f"sequence.thinking.{name}", getattr(budget, name)
        if not 0 < len(tokens) <= MAX_MARK_TOKENS:
            raise InvalidRequest(field, f"must be 1 to {MAX_MARK_TOKENS} tokens")
        if not all(0 <= token < vocab_size for token in tokens):
            raise InvalidRequest(field, f"token ids must be in [0, {vocab_size})")
    return ThinkingBudget(budget.tokens, tuple(budget.begin_token_ids), tuple(budget.end_token_ids), budget.is_open)


def _check_name(field: str, name: str, *, least: int) -> None:
    if not least <= len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(field, f"must have {least} to {MAX_NAME_CHARS} characters, has {len(name)}")


WithRows = Callable[[IncomingRequest, kv_pb2.SequenceSpec], Awaitable[IncomingRequest]]


@dataclass(slots=True, eq=False)
class _PendingRead:
    """A request that a thread reads, and the request's caller."""

    request_id: str
    caller: str
    cancelled: bool = False


class RequestReader:
    """Reads requests before the core knows them.

    Args:
        read: checks a request, in any thread.
        beside: threads for long requests, and those with pictures.
        files: looks at pictures; None: their files are not looked at.
    """

    def __init__(
        self,
        read: Callable[[kv_pb2.SequenceSpec], IncomingRequest],
        beside: ThreadOffload,
        files: PictureFiles | None = None,
    ) -> None:
        self._read_tokens = read
        self._beside = beside
        self._files = files
        self._looked_at: dict[bytes, None] = {}  # digests, the oldest first
        self._reading: set[_PendingRead] = set()

    def close(self) -> None:
        """End the process that looks at pictures."""
        if self._files is not None:
            self._files.close()

    def _read(self, spec: kv_pb2.SequenceSpec) -> IncomingRequest:
        incoming = self._read_tokens(spec)
        for item in incoming.media:
            if self._files is None or item.digest in self._looked_at:
                continue
            found = self._files.read("sequence.media", item.content)
            if (found.width, found.height) != (item.width, item.height):
                size = f"{found.width} x {found.height} pixels, not {item.width} x {item.height}"
                raise InvalidRequest("sequence.media", f"a picture has {size}")
            self._looked_at[item.digest] = None
            for digest in list(self._looked_at)[:-MAX_LOOKED_AT]:
                self._looked_at.pop(digest, None)  # another thread may have
        return incoming

    async def read(
        self, spec: kv_pb2.SequenceSpec, caller: str = "", with_rows: WithRows | None = None
    ) -> IncomingRequest:
        """Check a request of `caller`. State may change meanwhile: check the request again afterwards.

        `with_rows` adds the rows of the request's pictures; None = they are not wanted.

        Raises:
            InvalidRequest: naming the field at fault.
            Overloaded: too many requests are being read.
            Unavailable: the request was cancelled meanwhile.
        """
        if len(spec.token_ids) < TOKEN_BYTES * self._beside.least_tokens and not spec.media:
            return self._read(spec)
        if len(self._reading) >= MAX_PENDING_READS:
            raise Overloaded(f"{MAX_PENDING_READS} requests are being read", reason="queue_full", retry_after_s=1.0)
        reading = _PendingRead(spec.request_id, caller)
        self._reading.add(reading)
        try:
            incoming = await asyncio.get_running_loop().run_in_executor(self._beside.executor, self._read, spec)
            if with_rows is not None and not reading.cancelled:
                incoming = await with_rows(incoming, spec)
        finally:
            self._reading.discard(reading)
        if reading.cancelled:
            raise Unavailable("request cancelled during validation")
        return incoming

    def cancel(self, request_id: str, caller: str = "") -> bool:
        """Cancel reads under this id for `caller`; return whether there were any."""
        found = [read for read in self._reading if (read.request_id, read.caller) == (request_id, caller)]
        for reading in found:
            reading.cancelled = True
        return bool(found)
