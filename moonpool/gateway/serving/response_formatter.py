"""What writes one API's objects and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from moonpool.client import (
    GenerateResult,
    TokenEvent,
)
from moonpool.gateway.serving.errors import ErrorResponse


class ResponseFormatter(Protocol):
    """Writes one API's responses. `start` is called before the other methods.

    Attributes:
        stream_type: media type of a stream, "" = server-sent events; an error before the stream begins is JSON.
    """

    stream_type: ClassVar[str] = ""

    def start(self, request_id: str, *, emulated: bool) -> None:
        """Take the request's id. The first tokens have arrived. `emulated`: the cluster emulates compute."""
        ...

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        """The response as one object."""
        ...

    def first_events(self) -> Iterator[bytes]:
        """Server-sent events before the first text."""
        ...

    def add_tokens(self, event: TokenEvent) -> None:
        """Take the tokens and log probabilities of the next text."""
        ...

    def count_tokens(self, prompt_tokens: int, new_tokens: int) -> None:
        """Take the number of prompt tokens so far, and of the next event's tokens."""
        return

    def text_event(self, text: str, choice: int) -> bytes:
        """Server-sent events for the next text of a choice."""
        ...

    def last_text_event(self, text: str, choice: int, finish_reason: str) -> bytes:
        """As `text_event`, for the last text of a choice, which may be "", and the reason why the choice ended."""
        return self.text_event(text, choice) if text else b""

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        """Server-sent events after the last text."""
        ...

    async def keep(self) -> None:
        """Store the answer, if later requests may refer to the answer. Comes before the client gets the answer's end.

        Raises:
            Unavailable: the answer cannot be stored.
        """
        return

    def error_event(self, error: ErrorResponse) -> bytes:
        """The last server-sent event of a stream that failed."""
        ...

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        """Body for a response that failed before starting."""
        ...
