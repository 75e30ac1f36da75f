"""Traces in Mooncake's form: read line by line, checked, written, and turned into token ids.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one per block; equal ids
from the start = equal prefix). Two fields are our own, and may be missing: `tenant` (a name), and `n` (answers to the
prompt; each has `output_length`). Tenants share no prefix. A first line `{"block_tokens": N, ...}` without a timestamp
says how many tokens a block has; without one they are 512, as in the published traces. Tokens are a function of the
hash id alone, so equal ids give equal tokens.
"""

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from blake3 import blake3

from moonpool.errors import MoonpoolError
from moonpool.sampling_params import MAX_CHOICES

BLOCK_TOKENS = 512
TRACE_VARIABLE = "MOONPOOL_TRACE"
FIRST_TOKEN = 16
"""Ids below are left to special tokens."""
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
REMEMBERED_IDS = 1 << 20
"""Ids whose predecessors are remembered, the oldest are forgotten: a contradiction is found within so many blocks."""


class TraceError(MoonpoolError):
    """A trace is wrong; the message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    tenant: str = ""
    choices: int = 1
    """Answers wanted."""

    def tokens(self, vocab_size: int, block_tokens: int = BLOCK_TOKENS) -> "array[int]":
        """The prompt; typecode "i"."""
        prompt = array("i")
        for hash_id in self.hash_ids:
            prompt.extend(block_of(hash_id, vocab_size, block_tokens))
        assert len(prompt) >= self.input_length, "a block of the trace has no id"
        return prompt[: self.input_length]


@lru_cache(maxsize=4096)
def block_of(hash_id: int, vocab_size: int, block_tokens: int = BLOCK_TOKENS) -> "array[int]":
    """The tokens of a block."""
    words = array("I", blake3(f"moonpool trace block {hash_id}".encode()).digest(length=4 * block_tokens))
    return array("i", [FIRST_TOKEN + word % (vocab_size - FIRST_TOKEN) for word in words])


def trace_path(given: str) -> Path | None:
    """The trace asked for by an option, or by the environment; None for neither."""
    path = given or os.environ.get(TRACE_VARIABLE, "")
    return Path(path) if path else None


class Trace:
    """A trace's file. Iterating reads it line by line, so that its length costs no memory.

    Args:
        path: the file.
        limit: requests to read at most; 0 = all.

    Attributes:
        block_tokens: tokens of a block.

    Raises:
        TraceError: the file cannot be read; while iterating also: a line is wrong.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self.path = path
        self._limit = limit
        try:
            with path.open(encoding="utf-8") as lines:
                head = _header(lines.readline())
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: {error}") from error
        self._has_header = head is not None
        self.block_tokens = BLOCK_TOKENS if head is None else self._block_tokens_of(head)

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(self._requests(), self._limit or None)

    def _requests(self) -> Iterator[TraceRequest]:
        check = _Checker(self.block_tokens)
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if self._has_header and number == 1:
                    continue
                try:
                    yield check.request(line)
                except ValueError as error:
                    raise TraceError(f"{self.path}, line {number}: {error}") from error

    def _block_tokens_of(self, head: Mapping[str, Any]) -> int:
        tokens = head["block_tokens"]
        if not _is_count(tokens) or tokens == 0:
            raise TraceError(f"{self.path}, line 1: block_tokens must be a positive whole number, is {tokens!r}")
        return int(tokens)


def _header(line: str) -> Mapping[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and "block_tokens" in data and "timestamp" not in data else None


class _Checker:
    """Turns lines into requests; raises ValueError for what is wrong with one, or contradicts an earlier one."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._last = 0.0
        self._before: dict[int, int] = {}  # the id before each id; -1 before the first of a chain

    def request(self, line: str) -> TraceRequest:
        data = _object(line)
        at, tokens, answer, ids = (data[name] for name in FIELDS)
        _check_numbers(at, tokens, answer)
        tenant, choices = data.get("tenant", ""), data.get("n", 1)
        _check_wishes(tenant, choices)
        if at < self._last:
            raise ValueError(f"timestamp {at:g} is before that of the request before, {self._last:g}: not sorted")
        self._check_ids(tokens, ids)
        self._last = at
        return TraceRequest(at, tokens, answer, tuple(ids), tenant, choices)

    def _check_ids(self, tokens: int, ids: object) -> None:
        if not isinstance(ids, list) or not all(map(_is_count, ids)):
            raise ValueError("hash_ids must be a list of whole numbers of at least 0")
        blocks = -(-tokens // self._block_tokens)
        if len(ids) != blocks:
            raise ValueError(f"{tokens} tokens are {blocks} blocks of {self._block_tokens}, hash_ids has {len(ids)}")
        before = -1
        for hash_id in ids:
            known = self._before.setdefault(hash_id, before)
            if known != before:
                raise ValueError(f"hash id {hash_id} follows {_name(before)} here and {_name(known)} earlier")
            before = hash_id
        while len(self._before) > REMEMBERED_IDS:
            del self._before[next(iter(self._before))]


def _object(line: str) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    missing = [name for name in FIELDS if name not in data]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    return data


def _check_numbers(at: object, tokens: object, answer: object) -> None:
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
        raise ValueError(f"timestamp must be a number of at least 0, is {at!r}")
    for name, value in (("input_length", tokens), ("output_length", answer)):
        if not _is_count(value) or value == 0:
            raise ValueError(f"{name} must be a whole number of at least 1, is {value!r}")


def _check_wishes(tenant: object, choices: object) -> None:
    if not isinstance(tenant, str):
        raise ValueError(f"tenant must be a text, is {tenant!r}")
    if not _is_count(choices) or not isinstance(choices, int) or not 1 <= choices <= MAX_CHOICES:
        raise ValueError(f"n must be a whole number from 1 to {MAX_CHOICES}, is {choices!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _name(hash_id: int) -> str:
    return "nothing" if hash_id < 0 else str(hash_id)


def read_trace(path: Path, *, limit: int = 0) -> list[TraceRequest]:
    """The first `limit` requests of a trace, all for 0.

    Raises:
        TraceError: it cannot be read, or a line is wrong.
    """
    return list(Trace(path, limit))


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Writes a trace in the same form."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(trace_line(request) for request in requests)


def trace_line(request: TraceRequest) -> str:
    """One request's line."""
    line = {name: getattr(request, name) for name in FIELDS}
    if request.tenant:
        line["tenant"] = request.tenant
    if request.choices > 1:
        line["n"] = request.choices
    return json.dumps(line) + "\n"


def reusable_share(requests: Sequence[TraceRequest], block_tokens: int = BLOCK_TOKENS) -> float:
    """Share of prompt tokens in leading blocks that the tenant has had before: the limit of any cache's hit rate."""
    seen: set[tuple[str, int]] = set()
    hits = total = 0
    for request in requests:
        blocks = 0
        for hash_id in request.hash_ids[: request.input_length // block_tokens]:
            if (request.tenant, hash_id) not in seen:
                break
            blocks += 1
        hits += blocks * block_tokens
        total += request.input_length
        seen.update((request.tenant, hash_id) for hash_id in request.hash_ids)
    return hits / total if total else 0.0
