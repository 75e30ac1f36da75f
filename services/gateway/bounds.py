"""What a body may consist of, counted before it is read: JSON of a few MiB can become hundreds, and seconds of Python.

A body that is read, checked and turned into objects holds the event loop: all other requests wait meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from moonpool.errors import InvalidRequest

UNCHECKED_BYTES = 64 << 10
"""Bodies up to this size are not looked at: whatever they hold, it is little."""


class Parts(NamedTuple):
    """How many parts a JSON value has, itself included.

    Attributes:
        objects, lists: such as turns, and prompts of token ids.
        members: of all objects.
        texts: names of members among them.
        items: commas between members and between items of lists, such as token ids.
    """

    objects: int
    lists: int
    members: int
    texts: int
    items: int


MOST = Parts(objects=1 << 14, lists=1 << 14, members=1 << 16, texts=1 << 17, items=1 << 20)


def count_parts(raw: bytes) -> Parts:
    """The parts of a text that is JSON. Of one that is not, it says how much a reader may meet before it gives up."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so each quote begins or ends a text
    texts = unescaped.count(b'"') // 2
    if texts > MOST.texts:
        return Parts(0, 0, 0, texts, 0)
    outside = b"".join(unescaped.split(b'"')[::2])
    objects, lists, members, items = map(outside.count, (b"{", b"[", b":", b","))
    return Parts(objects, lists, members, texts, items)


def check_parts(raw: bytes) -> None:
    """Refuse a body that would take long to read.

    Raises:
        InvalidRequest: it has too many parts.
    """
    if len(raw) <= UNCHECKED_BYTES:
        return
    for what, count, most in zip(Parts._fields, count_parts(raw), MOST, strict=True):
        if count > most:
            raise InvalidRequest("", f"a body has at most {most} {what}")
