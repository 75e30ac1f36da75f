"""Recorded traces of the requests that come."""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from blake3 import blake3

from moonpool.base import world
from moonpool.base.errors import ConfigError
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.valid_request import ValidRequest

log = get_logger(__name__)
KEY_BYTES = 32
NUMBER_BYTES = 8
"""Bytes for a block's number and for a tenant's hashed name."""
MAX_UNHASHED = 1024
"""Requests that wait for the writer thread; more are left out."""
MAX_BLOCKS = 1 << 22


class TraceRecording:
    """The recording of a trace with all requests until `close`, on a separate thread.

    An earlier file of the same name is kept with the suffix `.old`. Requests without a token, and requests beyond the
    bounds, are left out.

    Args:
        path: the file.
        max_blocks: most blocks in requests with unwritten lines, 8 bytes each; beyond that number the oldest request is
            left out.

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
        self._queue: SimpleQueue[ValidRequest | tuple[int, int] | None] = SimpleQueue()
        self._known: set[int] = set()
        self._overrun = 0
        self._writer = _TraceWriter(file, max_blocks)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Requests that have no line in the trace."""
        return self._overrun + self._writer.left_out

    def opened(self, request: ValidRequest) -> None:
        """Record a request. Does not block."""
        if self._queue.qsize() >= MAX_UNHASHED:
            self._overrun += 1
            return
        self._known.add(request.spec.number)
        self._queue.put(request)

    def ended(self, number: int, tokens: int) -> None:
        """Record a request's end; `tokens` counts the tokens of each choice."""
        if number in self._known:
            self._known.remove(number)
            self._queue.put((number, tokens))

    def close(self) -> None:
        """Write the requests that have ended and close the file. Blocks until the thread is done."""
        self._queue.put(None)
        self._thread.join()
        if self.left_out:
            log.warning("requests are missing in the recording", requests=self.left_out)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if isinstance(event, ValidRequest):
                self._writer.opened(event)
            else:
                self._writer.ended(*event)
        self._writer.close()


@dataclass(slots=True)
class _TraceLine:
    timestamp: float
    prompt_tokens: int
    numbers: array[int]
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


class _TraceWriter:
    """The trace's lines in the order of arrival.

    A line waits until the line's request and all earlier requests have ended.
    """

    def __init__(self, file: BinaryIO, max_blocks: int) -> None:
        self.left_out = 0
        self._file = file
        self._max_blocks = max_blocks
        self._broken = False
        self._key = world.random_bytes(KEY_BYTES)
        self._lines: OrderedDict[int, _TraceLine] = OrderedDict()
        self._blocks = 0
        self._block_size = 0
        self._began: float | None = None
        self._last_ms = 0.0

    def opened(self, request: ValidRequest) -> None:
        if not self._block_size:
            self._block_size = request.block_size
            self._write({"block_size": request.block_size})
        if request.block_size != self._block_size:  # the cluster was set up anew; a trace has one block size
            self.left_out += 1
            return
        spec, numbers = request.spec, self._numbers(request)
        line = _TraceLine(
            self._timestamp(spec.arrived), spec.prompt_tokens, numbers, self._tenant_hash(spec.tenant), spec.choices
        )
        self._lines[spec.number] = line
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
        """Write the requests that have ended; the others are left out."""
        for number in [number for number, line in self._lines.items() if line.tokens is None]:
            self._take(number)
            self.left_out += 1
        self._write_ended()
        self._file.close()

    def _timestamp(self, at: float) -> float:
        """Milliseconds since the first request, never decreasing: requests may overtake each other while tokenised."""
        if self._began is None:
            self._began = at
        self._last_ms = max(self._last_ms, round(1e3 * (at - self._began), 3))
        return self._last_ms

    def _numbers(self, request: ValidRequest) -> array[int]:
        """Return a number per block. A last block that is not full gets a number from the whole prompt."""
        keys: list[bytes] = list(request.prompt_keys)
        if request.spec.prompt_tokens > len(keys) * request.block_size:
            keys.append(b"rest" + request.spec.prompt_key)
        digests = (blake3(key, key=self._key).digest(length=NUMBER_BYTES) for key in keys)
        return array("Q", (int.from_bytes(digest, "big") >> 1 for digest in digests))

    def _tenant_hash(self, tenant: str) -> str:
        """Stands for a tenant in this trace alone."""
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
        """Write a line; return whether writing worked.

        After a failure no line is written: the file may end in a line.
        """
        if self._broken:
            return False
        try:
            self._file.write(json.dumps(data).encode() + b"\n")
        except OSError as error:
            log.error("the recording ends early", error=str(error))
            self._broken = True
        return not self._broken
