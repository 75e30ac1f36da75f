"""Traces in Mooncake's form: read, generated from a seed, and turned into token ids.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one per 512-token block;
equal ids from the start = equal prefix). Tokens are a function of the hash id alone, so equal ids give equal tokens.
"""

import json
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

BLOCK_TOKENS = 512
TRACE_VARIABLE = "MOONPOOL_TRACE"
FIRST_TOKEN = 16
"""Ids below are left to special tokens."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def tokens(self, vocab_size: int) -> "array[int]":
        """The prompt; typecode "i"."""
        prompt = array("i")
        for hash_id in self.hash_ids:
            prompt.extend(block_of(hash_id, vocab_size))
        assert len(prompt) >= self.input_length, "a block of the trace has no id"
        return prompt[: self.input_length]


@lru_cache(maxsize=4096)
def block_of(hash_id: int, vocab_size: int) -> "array[int]":
    """The 512 tokens of a block."""
    words = array("I", blake3(f"moonpool trace block {hash_id}".encode()).digest(length=4 * BLOCK_TOKENS))
    return array("i", [FIRST_TOKEN + word % (vocab_size - FIRST_TOKEN) for word in words])


def trace_path(given: str) -> Path | None:
    """The trace asked for by an option, or by the environment; None for neither."""
    path = given or os.environ.get(TRACE_VARIABLE, "")
    return Path(path) if path else None


def read_trace(path: Path, *, limit: int = 0) -> list[TraceRequest]:
    """The first `limit` requests of a trace, all for 0, in order of time.

    Raises:
        OSError, ValueError, KeyError: it cannot be read.
    """
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if limit and len(requests) == limit:
                break
            data = json.loads(line)
            ids = tuple(data["hash_ids"])
            requests.append(TraceRequest(data["timestamp"], data["input_length"], data["output_length"], ids))
    return sorted(requests, key=lambda request: request.timestamp)


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Writes a trace in the same form."""
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests), encoding="utf-8")


def generate_trace(
    count: int, seed: int, *, rate_per_s: float = 2.0, turns: int = 4, applications: int = 3
) -> list[TraceRequest]:
    """A small trace of our own: conversations, each on one of some applications' long beginnings.

    Args:
        count: requests.
        seed: equal seeds give equal traces.
        rate_per_s: requests per second, Poisson.
        turns: turns of a conversation at most.
        applications: system prompts shared by conversations.
    """
    generator = random.Random(f"moonpool trace {seed}")
    ids = _counter()
    beginnings = [[next(ids) for _ in range(generator.randint(1, 3))] for _ in range(applications)]
    open_conversations: list[_Conversation] = []
    requests: list[TraceRequest] = []
    now_ms = 0.0
    while len(requests) < count:
        now_ms += generator.expovariate(rate_per_s) * 1000
        if not open_conversations or generator.random() < 1 / turns:
            open_conversations.append(_Conversation(list(generator.choice(beginnings))))
        conversation = generator.choice(open_conversations)
        requests.append(conversation.turn(round(now_ms), generator, ids))
        if conversation.turns == turns:
            open_conversations.remove(conversation)
    return requests


class _Conversation:
    """Turns whose prompts begin with all that was said before."""

    def __init__(self, beginning: list[int]) -> None:
        self._full = beginning
        self._tokens = len(beginning) * BLOCK_TOKENS
        self.turns = 0

    def turn(self, now_ms: float, generator: random.Random, ids: Iterator[int]) -> TraceRequest:
        said = round(generator.lognormvariate(6.2, 0.9))
        answer = 1 + round(generator.expovariate(1 / 60))
        self._tokens += min(max(said, 8), 6000)
        self.turns += 1
        while len(self._full) < self._tokens // BLOCK_TOKENS:
            self._full.append(next(ids))
        # A block that is not full yet will have another content when it is: its id is used once.
        tail = [next(ids)] if self._tokens % BLOCK_TOKENS else []
        request = TraceRequest(now_ms, self._tokens, answer, (*self._full, *tail))
        self._tokens += answer
        return request


def _counter() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def reusable_share(requests: Sequence[TraceRequest]) -> float:
    """Share of prompt tokens in leading blocks that an earlier request has had: the limit of any cache's hit rate."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        blocks = 0
        for hash_id in request.hash_ids[: request.input_length // BLOCK_TOKENS]:
            if hash_id not in seen:
                break
            blocks += 1
        hits += blocks * BLOCK_TOKENS
        total += request.input_length
        seen.update(request.hash_ids)
    return hits / total if total else 0.0
