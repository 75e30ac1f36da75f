"""What handlers of Responses work with beside what all handlers have."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.gateway.batches.runner import BatchRunner
from moonpool.gateway.responses.background import BackgroundResponses
from moonpool.gateway.responses.pins import ResponsePins
from moonpool.gateway.responses.store import ResponseStore
from moonpool.gateway.serving.context import GatewayContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesContext(GatewayContext):
    """A gateway with stored responses: one object for each gateway process.

    Attributes:
        responses: stored responses and conversations.
        pins: KV pins for conversations that clients continue by an id.
        background: responses that are computed while no client waits.
        batches: runs batches; None = this gateway keeps none.
    """

    responses: ResponseStore
    pins: ResponsePins
    background: BackgroundResponses
    batches: BatchRunner | None = None
