"""Traces in Mooncake's form: read line by line, checked, written, and turned into token ids.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one per block; equal ids
from the start = equal prefix). Two fields are our own, and may be missing: `tenant` (a name), and `n` (answers to the
prompt; each has `output_length`). Tenants share no prefix. A first line `{"block_size": N, ...}` without a timestamp
says how many tokens a block has; without one they are 512, as in the published traces. Tokens are a function of the
hash id alone, so equal ids give equal tokens.

Agents' requests wait for others, in the fields of Dynamo's agentic form: `request_id` names a request, `wait_for` lists
earlier lines' requests, and the request comes `delay` + `tool_wait_ms` ms after the last listed request has ended. With
`session_id` and `delay` alone a request waits for the line before of the same session, as in AIPerf's form. A request
that waits needs no `timestamp`.
"""

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any

from blake3 import blake3

from moonpool.base.errors import MoonpoolError
from moonpool.base.json_parts import parse_json
from moonpool.base.sampling_params import MAX_CHOICES

HEADERS = ("block_size", "block_tokens")
"""Names of the field of a first line; traces that were recorded before 0.2 have the second."""
BLOCK_SIZE = 512
TRACE_VARIABLE = "MOONPOOL_TRACE"
FIRST_TOKEN = 16
"""Ids below are left to special tokens."""
FIELDS = ("input_length", "output_length", "hash_ids")
REMEMBERED_IDS = 1 << 20
"""Ids with remembered predecessors, the oldest are forgotten: a contradiction within this many blocks is found."""


MAX_PROMPT_TOKENS = 1 << 24
"""Tokens of a prompt in a trace, at most."""


class TraceError(MoonpoolError):
    """A trace is wrong; the message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line in a trace."""

    timestamp: float
    """Milliseconds since the trace began; for a waiting request, as if the requests before took no time."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    tenant: str = ""
    choices: int = 1
    """Answers wanted."""
    session: str = ""
    """Conversation or agent that the request is a turn of; empty = none is known."""
    name: str = ""
    """Name by which later requests wait for this request."""
    wait_for: tuple[str, ...] = ()
    """Names of earlier requests that end before this request comes."""
    delay: float = 0.0
    """Milliseconds after the last of these ends: a tool works, a person thinks."""

    def tokens(self, vocab_size: int, block_size: int = BLOCK_SIZE) -> "array[int]":
        """The prompt; typecode "i"."""
        prompt = array("i")
        for hash_id in self.hash_ids:
            prompt.extend(block_of(hash_id, vocab_size, block_size))
        assert len(prompt) >= self.input_length, "a block of the trace has no id"
        return prompt[: self.input_length]


@lru_cache(maxsize=4096)
def block_of(hash_id: int, vocab_size: int, block_size: int = BLOCK_SIZE) -> "array[int]":
    """A block's tokens."""
    words = array("I", blake3(f"moonpool trace block {hash_id}".encode()).digest(length=4 * block_size))
    return array("i", [FIRST_TOKEN + word % (vocab_size - FIRST_TOKEN) for word in words])


def trace_path(given: str) -> Path | None:
    """The trace asked for by an option, or by the environment; None for neither."""
    path = given or os.environ.get(TRACE_VARIABLE, "")
    return Path(path) if path else None


class Trace:
    """A trace's file. Iterating reads the file line by line: the length costs no memory, but names of requests do.

    Args:
        path: the file.
        limit: requests to read at most; 0 = all.

    Attributes:
        block_size: tokens in a block.

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
        self.block_size = BLOCK_SIZE if head is None else self._block_size_of(head)

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(self._requests(), self._limit or None)

    def _requests(self) -> Iterator[TraceRequest]:
        check = _Checker(self.block_size)
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if self._has_header and number == 1:
                    continue
                try:
                    yield check.request(line)
                except ValueError as error:
                    raise TraceError(f"{self.path}, line {number}: {error}") from error

    def _block_size_of(self, head: Mapping[str, Any]) -> int:
        (tokens,) = (head[name] for name in HEADERS if name in head)
        if not _is_count(tokens) or tokens == 0:
            raise TraceError(f"{self.path}, line 1: block_size must be a positive whole number, is {tokens!r}")
        return int(tokens)


def _header(line: str) -> Mapping[str, Any] | None:
    try:
        data = parse_json(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and len(data.keys() & set(HEADERS)) == 1 and "timestamp" not in data else None


class _Checker:
    """Turns lines into requests; raises ValueError if a line is wrong, or contradicts an earlier line."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last = 0.0
        self._turns: dict[str, list[str]] = {}  # names of a session's requests
        self._times: dict[str, float] = {}  # of requests with a name
        self._before: dict[int, int] = {}  # the id before each id; -1 before the first of a chain

    def request(self, line: str) -> TraceRequest:
        data = _object(line)
        tokens, answer, ids = (data[name] for name in FIELDS)
        _check_lengths(tokens, answer)
        tenant, choices = data.get("tenant", ""), data.get("n", 1)
        _check_wishes(tenant, choices)
        self._check_ids(tokens, ids)
        session, name = _text(data, "session_id"), _text(data, "request_id")
        turns = self._turns.setdefault(session, []) if session else []
        name = name or (f"{session}#{len(turns)}" if session else "")
        wait_for, delay = self._waits(data, turns), _milliseconds(data, "delay") + _milliseconds(data, "tool_wait_ms")
        at = self._time(data, wait_for, delay)
        if name:
            if name in self._times:
                raise ValueError(f"request_id {name!r} is that of an earlier request, too")
            self._times[name] = at
            turns.append(name)
        return TraceRequest(at, tokens, answer, tuple(ids), tenant, choices, session, name, wait_for, delay)

    def _waits(self, data: Mapping[str, Any], turns: Sequence[str]) -> tuple[str, ...]:
        """Return the names that a request waits for."""
        names = data.get("wait_for") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"wait_for must be a list of request ids, is {names!r}")
        unknown = next((name for name in names if name not in self._times), None)
        if unknown is not None:
            raise ValueError(f"wait_for: no earlier request has the id {unknown!r}")
        in_turn = turns and not names and (data.get("delay") is not None or data.get("timestamp") is None)
        return (turns[-1],) if in_turn else tuple(names)

    def _time(self, data: Mapping[str, Any], wait_for: Sequence[str], delay: float) -> float:
        """Return the timestamp, or the earliest time of a request that waits."""
        at = data.get("timestamp")
        if at is None and not wait_for:
            raise ValueError("timestamp missing, and the request waits for no other")
        if at is None:
            return max(self._times[name] for name in wait_for) + delay
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
            raise ValueError(f"timestamp must be a number of at least 0, is {at!r}")
        if wait_for:
            return at
        if at < self._last:
            raise ValueError(f"timestamp {at:g} is before that of the request before, {self._last:g}: not sorted")
        self._last = at
        return at

    def _check_ids(self, tokens: int, ids: object) -> None:
        if not isinstance(ids, list) or not all(map(_is_count, ids)):
            raise ValueError("hash_ids must be a list of whole numbers of at least 0")
        blocks = -(-tokens // self._block_size)
        if len(ids) != blocks:
            raise ValueError(f"{tokens} tokens are {blocks} blocks of {self._block_size}, hash_ids has {len(ids)}")
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
        data = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    missing = [name for name in FIELDS if name not in data]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    return data


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name) or ""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, is {value!r}")
    return value


def _milliseconds(data: Mapping[str, Any], name: str) -> float:
    value = data.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, is {value!r}")
    return float(value)


def _check_lengths(tokens: object, answer: object) -> None:
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
        TraceError: the file cannot be read, or a line is wrong.
    """
    return list(Trace(path, limit))


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write a trace in the same form."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(trace_line(request) for request in requests)


def trace_line(request: TraceRequest) -> str:
    """One request's line."""
    line: dict[str, Any] = {name: getattr(request, name) for name in ("timestamp", *FIELDS)}
    if request.tenant:
        line["tenant"] = request.tenant
    if request.choices > 1:
        line["n"] = request.choices
    if request.session:
        line["session_id"] = request.session
    if request.name:
        line["request_id"] = request.name
    if request.wait_for:
        line |= {"wait_for": list(request.wait_for), "delay": request.delay}
    return json.dumps(line) + "\n"


class ChainIds:
    """Our ids for blocks with ids that may follow different blocks elsewhere: each of ours has a single predecessor."""

    def __init__(self, block_size: int, fresh: Iterator[int] | None = None) -> None:
        """`fresh` gives ids that are not used yet; None = all are free."""
        self._block_size = block_size
        self._fresh = count() if fresh is None else fresh
        self._known: dict[tuple[int, int], int] = {}  # our id, by our id before and the given id

    def chain(self, ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Our ids for a prompt's blocks. Blocks without an id, and a last block that is not full, are not shared.

        Raises:
            ValueError: no model takes so many tokens.
        """
        if tokens > MAX_PROMPT_TOKENS:
            raise ValueError(f"a prompt has at most {MAX_PROMPT_TOKENS} tokens, not {tokens}")
        chain: list[int] = []
        before = -1
        for place in range(-(-tokens // self._block_size)):
            full = (place + 1) * self._block_size <= tokens
            fresh = next(self._fresh)
            before = self._known.setdefault((before, ids[place]), fresh) if full and place < len(ids) else fresh
            chain.append(before)
        return tuple(chain)


def reusable_share(requests: Sequence[TraceRequest], block_size: int = BLOCK_SIZE) -> float:
    """Share of prompt tokens in leading blocks that the tenant has had before: the limit for any cache's hit rate."""
    seen: set[tuple[str, int]] = set()
    hits = total = 0
    for request in requests:
        blocks = 0
        for hash_id in request.hash_ids[: request.input_length // block_size]:
            if (request.tenant, hash_id) not in seen:
                break
            blocks += 1
        hits += blocks * block_size
        total += request.input_length
        seen.update((request.tenant, hash_id) for hash_id in request.hash_ids)
    return hits / total if total else 0.0
