"""A request whose client does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import InvalidRequest, NotFound, Unavailable
from moonpool.base.telemetry.logs import get_logger
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.event_log import EventLog
from moonpool.gateway.responses.response_object import UNANSWERED, failure, response_event
from moonpool.gateway.responses.store import StoredRecord
from moonpool.gateway.responses.turn import ResponsesTurn, without_output
from moonpool.gateway.serving.asgi_reply import to_nobody
from moonpool.gateway.serving.errors import error_response
from moonpool.gateway.serving.generation_response import GenerationResponse

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BackgroundTurn:
    """A request whose client does not wait: the response is stored before being computed, and changes status.

    Attributes:
        gateway: where the response is computed and stored.
        turn: the request in the conversation.
        head: the response's fields independent of the status.
        events: the events of a response that was asked for as a stream; None = not streamed.
    """

    gateway: ResponsesContext
    turn: ResponsesTurn
    head: Mapping[str, Any]
    events: EventLog | None

    @property
    def name(self) -> str:
        return str(self.head["id"])

    def response(self, status: str, error: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The response without an answer."""
        return {**self.head, **UNANSWERED, "status": status, "error": error, "output": []}

    async def start(self, generation: GenerationResponse, held: ExitStack) -> None:
        """Store the response and begin to compute the answer, which then has what is `held`.

        Raises:
            HttpError: the tenant has too many responses under way, or this gateway stores none.
            Unavailable: there is no room for the response.
        """
        if not self.turn.is_stored:
            raise InvalidRequest("background", "this gateway stores nothing (response_store_bytes is 0)")
        self.gateway.background.check_room(self.turn.tenant)
        queued = self.response("queued")
        await self.turn.put(queued)
        self._tell("created", queued)
        self._tell("queued", queued)
        work = self._work(generation)
        self.gateway.background.start(self.turn.tenant, self.name, work, held.pop_all(), self.events)

    def placed(self) -> None:
        """Note that an instance has taken the request."""
        if self.gateway.background.placed(self.turn.tenant, self.name):
            self._tell("in_progress", self.response("in_progress"))

    def _tell(self, kind: str, response: Mapping[str, Any]) -> None:
        if self.events is not None:
            self.events.add(response_event(f"response.{kind}", len(self.events), response=response))

    async def _work(self, generation: GenerationResponse) -> None:
        """Compute the response; an answer that fails or is cancelled is stored as such."""
        ended = self.response("cancelled")
        try:
            error = await generation.complete(to_nobody if self.events is None else self.events.send)
            if error is None:
                return
            ended = self.response("failed", failure(error))
        except asyncio.CancelledError:
            pass  # the gateway stops, or the client has cancelled the response
        except Exception as error:  # no caller waits for the task
            log.exception("background_response_failed", response=self.name)
            ended = self.response("failed", failure(error_response(error)))
        with suppress(NotFound, Unavailable):  # the response was deleted meanwhile
            await self.turn.store.replace_body(self.turn.tenant, StoredRecord(self.name, without_output(ended)))
        if ended["status"] == "failed":
            self._tell("failed", ended)
