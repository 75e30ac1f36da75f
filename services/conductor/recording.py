"""Records the requests of a live conductor as a trace that `simulator.traces` reads.

One JSON line per request, in order of arrival: when it came, the lengths of prompt and answer, a number per block of
the prompt, a name for its tenant, and how many answers it wanted. Numbers and names are hashes under a random key,
which is drawn for each recording and kept nowhere: equal blocks have equal numbers within one recording, and nothing
can be learnt from them of what was said, or by whom.

A thread hashes and writes. A line waits until its request and all before it have ended.
"""

import json
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from blake3 import blake3

from moonpool.errors import ConfigError
from moonpool.telemetry.logs import get_logger

KEY_BYTES = 32
NUMBER_BYTES = 8
"""Of a block's number and of a tenant's name."""
MAX_UNHASHED = 1024
"""Requests that the thread has not looked at yet; more are left out."""
MAX_BLOCKS = 1 << 22

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A request has come.

    Attributes:
        number: names it.
        at: when, seconds of any clock.
        prompt_tokens: length of its prompt.
        block_tokens: tokens of a block.
        keys: of the prompt's full blocks, each of which says what came before it.
        prompt_key: hash of the whole prompt.
        tenant: "" = none.
        choices: sequences that decode runs for it.
    """

    number: int
    at: float
    prompt_tokens: int
    block_tokens: int
    keys: Sequence[bytes]
    prompt_key: bytes
    tenant: str = ""
    choices: int = 1


@dataclass(slots=True)
class _Line:
    timestamp: float
    prompt_tokens: int
    numbers: "array[int]"
    tenant: str
    choices: int
    tokens: int | None = None

    def to_json(self, tokens: int) -> Mapping[str, object]:
        line = {
            "timestamp": self.timestamp,
            "input_length": self.prompt_tokens,
            "output_length": tokens,
            "hash_ids": self.numbers.tolist(),
        }
        tenant = {"tenant": self.tenant} if self.tenant else {}
        return line | tenant | ({"n": self.choices} if self.choices > 1 else {})


class Recording:
    """A recording that goes on until `close`.

    An earlier file of that name is kept with `.old` behind it. Requests that end without a token, and those that do not
    fit into the bounds, are left out.

    Args:
        path: the file.
        max_blocks: blocks of requests that wait for their line, 8 bytes each; beyond it the oldest request is left out.

    Raises:
        ConfigError: naming `record_trace`: the file cannot be written.
    """

    def __init__(self, path: Path, max_blocks: int = MAX_BLOCKS) -> None:
        try:
            if path.is_file():
                path.replace(path.with_name(f"{path.name}.old"))
            file = path.open("wb", buffering=0)  # each line is one write, so a crash cuts none
        except OSError as error:
            raise ConfigError("record_trace", f"cannot write {path}: {error.strerror or error}") from error
        self._queue: SimpleQueue[Opened | tuple[int, int] | None] = SimpleQueue()
        self._known: set[int] = set()
        self._overrun = 0
        self._writer = _Writer(file, max_blocks)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Requests that have no line, and will have none."""
        return self._overrun + self._writer.left_out

    def opened(self, request: Opened) -> None:
        """Notes a request; waits for nothing."""
        if self._queue.qsize() >= MAX_UNHASHED:
            self._overrun += 1
            return
        self._known.add(request.number)
        self._queue.put(request)

    def ended(self, number: int, tokens: int) -> None:
        """Notes that a request has ended, with so many tokens of each answer."""
        if number in self._known:
            self._known.remove(number)
            self._queue.put((number, tokens))

    def close(self) -> None:
        """Writes what has ended and closes the file; waits for the thread."""
        self._queue.put(None)
        self._thread.join()
        if self.left_out:
            log.warning("requests are missing in the recording", requests=self.left_out)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if isinstance(event, Opened):
                self._writer.opened(event)
            else:
                self._writer.ended(*event)
        self._writer.close()


class _Writer:
    """What the thread knows: lines in order of arrival, those that wait among them."""

    def __init__(self, file: BinaryIO, max_blocks: int) -> None:
        self.left_out = 0
        self._file = file
        self._max_blocks = max_blocks
        self._broken = False
        self._key = secrets.token_bytes(KEY_BYTES)
        self._lines: OrderedDict[int, _Line] = OrderedDict()
        self._blocks = 0
        self._block_tokens = 0
        self._began: float | None = None
        self._last_ms = 0.0

    def opened(self, request: Opened) -> None:
        if not self._block_tokens:
            self._block_tokens = request.block_tokens
            self._write({"block_tokens": request.block_tokens})
        if request.block_tokens != self._block_tokens:  # the cluster was set up anew; a trace has one size of block
            self.left_out += 1
            return
        tenant, numbers = self._name(request.tenant), self._numbers(request)
        line = _Line(self._timestamp(request.at), request.prompt_tokens, numbers, tenant, request.choices)
        self._lines[request.number] = line
        self._blocks += len(line.numbers)
        while self._blocks > self._max_blocks:
            self._take(next(iter(self._lines)))
            self.left_out += 1
            self._write_ended()

    def ended(self, number: int, tokens: int) -> None:
        if number in self._lines:
            self._lines[number].tokens = tokens
            self._write_ended()

    def close(self) -> None:
        """Writes what has ended; the rest is left out."""
        for number in [number for number, line in self._lines.items() if line.tokens is None]:
            self._take(number)
            self.left_out += 1
        self._write_ended()
        self._file.close()

    def _timestamp(self, at: float) -> float:
        """Milliseconds since the first request. One that overtook another while tokenised does not come before it."""
        if self._began is None:
            self._began = at
        self._last_ms = max(self._last_ms, round(1e3 * (at - self._began), 3))
        return self._last_ms

    def _numbers(self, request: Opened) -> "array[int]":
        """A number per block; the last block, if it is not full, is known by the whole prompt."""
        keys = list(request.keys)
        if request.prompt_tokens > len(keys) * request.block_tokens:
            keys.append(b"rest" + request.prompt_key)
        digests = (blake3(key, key=self._key).digest(length=NUMBER_BYTES) for key in keys)
        return array("Q", (int.from_bytes(digest, "big") >> 1 for digest in digests))

    def _name(self, tenant: str) -> str:
        """Stands for a tenant in this recording alone."""
        return blake3(b"tenant" + tenant.encode(), key=self._key).hexdigest(length=NUMBER_BYTES) if tenant else ""

    def _write_ended(self) -> None:
        while self._lines:
            number, line = next(iter(self._lines.items()))
            if line.tokens is None:
                return
            self._take(number)
            if not line.tokens or not self._write(line.to_json(line.tokens)):
                self.left_out += 1

    def _take(self, number: int) -> None:
        self._blocks -= len(self._lines.pop(number).numbers)

    def _write(self, data: Mapping[str, object]) -> bool:
        """Whether it was written; after the first failure nothing is, as the file may end within a line."""
        if self._broken:
            return False
        try:
            self._file.write(json.dumps(data).encode() + b"\n")
        except OSError as error:
            log.error("the recording ends early", error=str(error))
            self._broken = True
        return not self._broken
