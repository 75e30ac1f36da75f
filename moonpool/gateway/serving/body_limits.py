"""What bodies may cost: the memory that they hold, how fast they come, and how much there is to parse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import le
from typing import NamedTuple

from moonpool.base.errors import InvalidRequest, Unavailable

BODY_COPIES = 4
"""Memory for a request in progress, as a multiple of the body's size: the text, and the derived objects."""
MAX_PACED = 1024
"""Tenants beyond which those whose bytes are all due are forgotten."""
UNCHECKED_BYTES = 64 << 10
"""Bodies up to this size are parsed without counting their parts first."""


class BodyMemory:
    """The memory that the bodies of all requests in progress may take.

    A tenant may take as much as is still free, so that one tenant gets at most half of the memory, and a later tenant
    finds some.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        """Memory that is taken now, in bytes."""
        return self._held.total()

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Hold memory for one body while the body of the `with` runs. Yields a function that takes more bytes.

        That function raises Unavailable if the memory is used up.
        """
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            wanted = num_bytes * BODY_COPIES
            if self._held[tenant] + wanted > self._most_bytes - self.held_bytes:
                raise Unavailable(
                    f"the bodies of requests in progress take as much as body_memory_bytes allows ({self._most_bytes})"
                )
            taken += wanted
            self._held[tenant] += wanted

        try:
            yield take
        finally:
            self._held[tenant] -= taken
            if not self._held[tenant]:
                del self._held[tenant]


PACE_BYTES_PER_S, PACE_AHEAD_BYTES = 8 << 20, 8 << 20
"""How fast a tenant's bodies are read for long, and how much may come at once: more text than engines compute, and a
tenth of a processor to read and parse.
"""


class BodyPace:
    """How fast each tenant's bodies are read: to read and parse large ones takes processors from others' answers."""

    def __init__(self, bytes_per_s: float = PACE_BYTES_PER_S, ahead_bytes: int = PACE_AHEAD_BYTES) -> None:
        self._bytes_per_s = bytes_per_s
        self._ahead_s = ahead_bytes / bytes_per_s
        self._due: dict[str, float] = {}  # by tenant, when what was read so far is due at this pace

    @property
    def num_tenants(self) -> int:
        """Tenants that are remembered."""
        return len(self._due)

    def wait_s(self, tenant: str, num_bytes: int, now: float) -> float:
        """Count bytes that a tenant's body has brought; returns the seconds to wait before more are read."""
        due = max(self._due.get(tenant, 0.0), now) + num_bytes / self._bytes_per_s
        if len(self._due) >= MAX_PACED:
            self._due = {name: until for name, until in self._due.items() if until > now}
        self._due[tenant] = due
        return max(0.0, due - now - self._ahead_s)


class JsonPartCounts(NamedTuple):
    """Number of parts in a JSON value, the value included.

    Attributes:
        objects: JSON objects, for example messages.
        arrays: JSON arrays, for example prompts of token ids.
        members: members of all objects.
        strings: strings, including the names of members.
        items: commas between members and between items of arrays, for example token ids.
    """

    objects: int
    arrays: int
    members: int
    strings: int
    items: int


MAX_JSON_PARTS = JsonPartCounts(objects=1 << 13, arrays=1 << 13, members=1 << 15, strings=1 << 16, items=1 << 17)
"""Parsing holds the interpreter lock, so one body's parts bound how long other requests may wait for the lock."""


def check_json_parts(raw: bytes) -> None:
    """Refuse a body that would take long to parse.

    Raises:
        InvalidRequest: the body has too many parts.
    """
    # Counting signs also within strings is far cheaper, and enough for most bodies.
    if len(raw) <= UNCHECKED_BYTES or all(map(le, _most_json_parts(raw), MAX_JSON_PARTS)):
        return
    for what, count, most in zip(JsonPartCounts._fields, count_json_parts(raw), MAX_JSON_PARTS, strict=True):
        if count > most:
            raise InvalidRequest("", f"a body has at most {most} {what}")


def count_json_parts(raw: bytes) -> JsonPartCounts:
    """Count the parts of JSON text. For text that is not JSON, the counts bound the work of a parser."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so each quote begins or ends a string
    strings = unescaped.count(b'"') // 2
    if strings > MAX_JSON_PARTS.strings:
        return JsonPartCounts(0, 0, 0, strings, 0)
    outside = b"".join(unescaped.split(b'"')[::2])
    objects, arrays, members, items = map(outside.count, (b"{", b"[", b":", b","))
    return JsonPartCounts(objects, arrays, members, strings, items)


def _most_json_parts(raw: bytes) -> JsonPartCounts:
    """As `count_json_parts`, with the signs within strings."""
    objects, arrays, members, quotes, items = map(raw.count, (b"{", b"[", b":", b'"', b","))
    return JsonPartCounts(objects, arrays, members, quotes // 2, items)
