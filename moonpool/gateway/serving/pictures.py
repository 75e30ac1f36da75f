"""Pictures in messages: from what a body has to the SDK's pictures, each looked at before the request is sent."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moonpool.base.checkpoint import Tokenizer, resolve
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.errors import InvalidRequest, MoonpoolError
from moonpool.base.frozen import frozen
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.files import PictureFiles
from moonpool.base.pictures.limits import MAX_BYTES, MAX_PICTURES
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.client import GenerateArguments, Message, Picture
from moonpool.gateway.serving.body import Body
from moonpool.gateway.serving.picture_fetch import PictureFetcher

PICTURE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are pictures: OpenAI's of chats and of responses, and Anthropic's."""
_BASE64_CHARS = (MAX_BYTES + 2) // 3 * 4


def picture_rule(model: str, tokenizer: Tokenizer) -> PictureRule | str:
    """What a checkpoint makes of pictures, as the conductor reads it; a text says why it takes none."""
    try:
        return read_rule(resolve(model), lambda: tokenizer)
    except MoonpoolError as error:  # whoever reads the weights says what is wrong
        return str(error)


def pictures_of(messages: Sequence[Message]) -> list[Picture]:
    """The pictures of a conversation, in their order."""
    return [part["picture"] for message in messages for part in message.get("parts", ()) if "picture" in part]


class ImageUrl(Body):
    """The picture of a part `image_url`."""

    ignored = ("format", "uuid")

    url: str
    detail: str | None = None


class ImageSource(Body):
    """The picture of a part `image`, as Anthropic has it."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": ()}

    type: str
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


@frozen
class LinkedPicture(Picture):
    """A picture that is not here yet.

    Attributes:
        url: where it is.
    """

    url: str = ""


def sent_picture(
    field: str, image_url: str | ImageUrl | None, source: ImageSource | None, detail: str | None
) -> Picture:
    """The picture of a part, not looked at yet: without its size.

    Raises:
        InvalidRequest: the part has no picture, or no data; names what is wrong below `field`.
    """
    if source is not None:
        if source.type == "url" and source.url is not None:
            return LinkedPicture(b"", 0, 0, "", f"{field}.source.url", source.url)
        if source.type != "base64" or source.data is None:
            raise InvalidRequest(f"{field}.source.type", f"must be base64 with data, or url, not {source.type!r}")
        return sent_base64(f"{field}.source.data", source.data)
    if image_url is None:
        raise InvalidRequest(field, "has no picture")
    url, name = (image_url, "image_url") if isinstance(image_url, str) else (image_url.url, "image_url.url")
    detail = detail if isinstance(image_url, str) else image_url.detail or detail
    place = f"{field}.{name}"
    head, comma, data = url.partition(",")
    if not url.startswith("data:"):
        return LinkedPicture(b"", 0, 0, detail or "", place, url)
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        raise InvalidRequest(place, "must be data:image/...;base64,...")
    return Picture(_decoded(place, data), 0, 0, detail or "", place)


def sent_base64(field: str, data: str) -> Picture:
    """The picture of a file in base64, not looked at yet; raises InvalidRequest as `sent_picture`."""
    return Picture(_decoded(field, data), 0, 0, "", field)


def _decoded(field: str, data: str) -> bytes:
    if len(data) > _BASE64_CHARS:  # before anything is decoded
        raise InvalidRequest(field, f"the picture has more than {MAX_BYTES} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(field, f"is no base64: {error}") from None


class PictureReader:
    """Looks at the pictures of requests.

    Args:
        turns: a thread, by turns of tenants.
        fetching: threads that fetch pictures, by turns of tenants.
        fetcher: fetches pictures by URL.
    """

    def __init__(self, turns: TenantTurns, fetching: TenantTurns, fetcher: PictureFetcher) -> None:
        self._turns, self._fetching, self._fetcher = turns, fetching, fetcher
        self._files = PictureFiles()

    def close(self) -> None:
        """End the process that decodes."""
        self._files.close()

    async def read_prompts(self, tenant: str, prompts: Sequence[GenerateArguments]) -> list[GenerateArguments]:
        """The prompts with the sizes of their pictures; raises as `read`."""
        found = list(prompts)
        for index, prompt in enumerate(found):
            if messages := prompt.get("messages"):
                found[index] = {**prompt, "messages": await self.read(tenant, messages)}
        return found

    async def read(self, tenant: str, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with the sizes of their pictures.

        Raises:
            InvalidRequest: a file is no picture that can be taken; names the field.
            Unavailable: pictures cannot be read here.
        """
        sent = pictures_of(messages)
        if not sent:
            return messages
        if len(sent) > MAX_PICTURES:
            raise InvalidRequest("messages", f"{len(sent)} pictures, at most {MAX_PICTURES} are allowed")
        found = {id(picture): await self._read(tenant, picture) for picture in sent}
        return [_with_sizes(message, found) for message in messages]

    async def _read(self, tenant: str, picture: Picture) -> Picture:
        if picture.width:
            return picture
        place, content = picture.place or "messages", picture.content
        if isinstance(picture, LinkedPicture):
            url = picture.url
            content = await self._fetching.run(tenant, lambda: self._fetcher.fetch(place, url))
        return await self._turns.run(tenant, lambda: self._files.read(place, content, picture.detail))


def _with_sizes(message: Message, found: Mapping[int, Picture]) -> Message:
    if "parts" not in message:
        return message
    parts: list[Any] = [
        {"picture": found[id(part["picture"])]} if "picture" in part else part for part in message["parts"]
    ]
    return {**message, "parts": parts}
