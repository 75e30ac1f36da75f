"""Pictures within a prompt: where their tokens stand, and what else than tokens their KV depends on."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import field

from blake3 import blake3

from moonpool.base.errors import InvalidRequest
from moonpool.base.frozen import frozen

DIGEST_BYTES = 32
MAX_MEDIA = 64
"""Most pictures of one prompt."""
_DIGEST_CONTEXT = "moonpool media digest v1"
_OFFSET = struct.Struct("<I")


@frozen
class MediaItem:
    """A picture in a prompt.

    Attributes:
        begin: position of its first token.
        end: position behind its last token. All its tokens are the model's marks, whatever the picture shows.
        digest: 32-byte hash of all that decides its embeddings (`media_digest`).
        content: the picture's file; b"" where nobody computes it.
        width: pixels, once turned as the file says.
        height: pixels.
        detail: how closely the model looks, in OpenAI's words; "" = auto.
    """

    begin: int
    end: int
    digest: bytes
    content: bytes = field(default=b"", compare=False, repr=False)
    width: int = field(default=0, compare=False)
    height: int = field(default=0, compare=False)
    detail: str = field(default="", compare=False)


def media_digest(content: bytes, settings: Iterable[object]) -> bytes:
    """32-byte hash of a picture's file, and of the settings by which it becomes embeddings: detail, grid, processor."""
    digest = blake3(derive_key_context=_DIGEST_CONTEXT)
    for part in (content, *(str(value).encode() for value in settings)):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def check_media(field_name: str, media: Sequence[MediaItem], prompt_tokens: int) -> None:
    """Check the places and digests of a prompt's pictures.

    Raises:
        InvalidRequest: names `field_name`.
    """
    if len(media) > MAX_MEDIA:
        raise InvalidRequest(field_name, f"a prompt has at most {MAX_MEDIA} pictures, not {len(media)}")
    end = 0
    for item in media:
        if not end <= item.begin < item.end <= prompt_tokens:
            raise InvalidRequest(field_name, f"[{item.begin}, {item.end}) is no place behind {end} in the prompt")
        if len(item.digest) != DIGEST_BYTES:
            raise InvalidRequest(field_name, f"a digest has {DIGEST_BYTES} bytes, not {len(item.digest)}")
        end = item.end


def block_marks(media: Sequence[MediaItem], first: int, tokens: int, block_size: int) -> dict[int, bytes]:
    """Return what pictures add to the keys of blocks: of each that begins in a block, its offset there and its digest.

    A block into which a picture only continues has the picture in its parent's key.

    Args:
        media: the prompt's pictures, in order.
        first: position of the first token, where a block begins.
        tokens: number of tokens.
        block_size: tokens per block.

    Returns:
        By index of the block behind `first`.
    """
    marks: dict[int, bytes] = {}
    for item in media:
        if first <= item.begin < first + tokens:
            index, offset = divmod(item.begin - first, block_size)
            marks[index] = marks.get(index, b"") + _OFFSET.pack(offset) + item.digest
    return marks


def overlapping(media: Sequence[MediaItem], begin: int, end: int) -> list[MediaItem]:
    """Return the pictures with tokens at the positions [begin, end)."""
    return [item for item in media if item.begin < end and begin < item.end]
