"""An endpoint picker of the Gateway API inference extension: tells Envoy which engine shall serve a request.

One stream of Envoy's ext_proc is one HTTP request. The body is read, placed as any prompt, and sent on unchanged. The
prompt counts as load at the engine until the engine's response begins.
"""

# ruff: noqa: N802

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from google.protobuf.struct_pb2 import Struct

from moonpool.base.errors import InvalidRequest, MoonpoolError, NotFound, Overloaded, Unavailable
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.dispatcher import Dispatcher
from moonpool.conductor.picker_body import read_body
from moonpool.conductor.registry import Registry
from moonpool.v1 import kv_pb2
from moonpool.v1.ext_proc_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpHeaders,
    HttpStatus,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
    StreamedBodyResponse,
    TrailersResponse,
)

DESTINATION = "x-gateway-destination-endpoint"
SERVED = f"{DESTINATION}-served"
DESTINATIONS_ALLOWED = "x-gateway-destination-endpoint-subset"
HINT_NAMESPACE, PICK_NAMESPACE = "envoy.lb.subset_hint", "envoy.lb"
MAX_BODY_BYTES = 16 << 20
MAX_BODIES_BYTES = 256 << 20
"""Most bytes of all requests' bodies that wait for an engine."""
PIECE_BYTES = 62_000
"""Largest piece of a body to send on: Envoy's own limit is 64 KiB."""
PLACE_LIMIT_S = 30.0
FULL_DUPLEX = ProtocolConfiguration.FULL_DUPLEX_STREAMED
log = get_logger(__name__)

Outgoing = AsyncIterator[ProcessingResponse]


class _BodyTooLargeError(MoonpoolError):
    """The body is not read."""


@dataclass(slots=True)
class _BodyBytes:
    """Bytes of the bodies of all requests that wait for an engine."""

    held: int = 0


class EndpointPicker:
    """The server of `ExternalProcessor`.

    Args:
        registry: the members, with their engines' addresses.
        dispatcher: asks the core.
        on_served: told of each response whose engine the proxy names: whether the engine is the one picked first.
    """

    def __init__(self, registry: Registry, dispatcher: Dispatcher, on_served: Callable[[bool], None]) -> None:
        self._registry, self._dispatcher, self._on_served = registry, dispatcher, on_served
        self._bodies = _BodyBytes()

    async def Process(self, requests: AsyncIterator[ProcessingRequest], context: object) -> Outgoing:
        """One HTTP request and its response."""
        stream = _Stream(self._registry, self._dispatcher, self._bodies, self._on_served)
        try:
            async for request in requests:
                async for response in stream.take(request):
                    yield response
                if stream.refused:
                    return
        finally:
            stream.done()


class _Stream:
    """One HTTP request.

    Attributes:
        refused: the client has got an answer without an engine.
    """

    def __init__(
        self, registry: Registry, dispatcher: Dispatcher, bodies: _BodyBytes, on_served: Callable[[bool], None]
    ) -> None:
        self._registry, self._dispatcher, self._bodies = registry, dispatcher, bodies
        self._on_served = on_served
        self._places: list[str] = []
        self._headers: dict[str, str] = {}
        self._allowed: frozenset[str] | None = None
        self._body = bytearray()
        self._modes = [FULL_DUPLEX, FULL_DUPLEX]  # of request and response
        self._number = 0
        self._metadata = Struct()
        self.refused = False

    def done(self) -> None:
        """The engine answers, or the stream is over; may be called again."""
        self._drop_body()
        if self._number:
            self._dispatcher.endpoint_done(self._number)
            self._number = 0

    async def take(self, message: ProcessingRequest) -> Outgoing:
        """Answer a message of the proxy."""
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._modes = [config.request_body_mode, config.response_body_mode]
        try:
            part = message.WhichOneof("request") or ""
            answers = self._take_request(message) if part.startswith("request") else self._take_response(message)
            async for response in answers:
                yield response
        except MoonpoolError as error:
            self.refused = True
            yield ProcessingResponse(immediate_response=refusal(error))

    async def _take_request(self, message: ProcessingRequest) -> Outgoing:
        match message.WhichOneof("request"):
            case "request_headers":
                self._allowed = _allowed(message)
                self._headers = _text_headers(message.request_headers)
                if message.request_headers.end_of_stream:
                    headers = HeadersResponse(response=await self._picked())
                    yield ProcessingResponse(request_headers=headers, dynamic_metadata=self._metadata)
                elif self._modes[0] != FULL_DUPLEX:  # the body comes once the headers are answered
                    yield ProcessingResponse(request_headers=HeadersResponse())
            case "request_body":
                piece = message.request_body
                async for response in self._take_body(piece.body, last=piece.end_of_stream):
                    yield response
            case "request_trailers":
                if self._modes[0] == FULL_DUPLEX and not self._number:
                    async for response in self._take_body(b"", last=True):
                        yield response
                yield ProcessingResponse(request_trailers=TrailersResponse())

    async def _take_response(self, message: ProcessingRequest) -> Outgoing:
        match message.WhichOneof("request"):
            case "response_headers":
                self._note_served(message)
                self.done()
                yield ProcessingResponse(response_headers=HeadersResponse())
            case "response_body":
                yield ProcessingResponse(response_body=self._passed_on(message))
            case "response_trailers":
                yield ProcessingResponse(response_trailers=TrailersResponse())

    async def _take_body(self, piece: bytes, last: bool) -> Outgoing:
        if len(self._body) + len(piece) > MAX_BODY_BYTES:
            raise _BodyTooLargeError(f"the body has more than {MAX_BODY_BYTES} bytes")
        if self._bodies.held + len(piece) > MAX_BODIES_BYTES:
            raise Unavailable(f"the bodies of requests that wait for an engine have {MAX_BODIES_BYTES} bytes")
        self._body += piece
        self._bodies.held += len(piece)
        if not last:
            if self._modes[0] != FULL_DUPLEX:
                yield ProcessingResponse(request_body=BodyResponse())
            return
        picked, body = await self._picked(), bytes(self._body)
        self._drop_body()
        if self._modes[0] != FULL_DUPLEX:
            yield ProcessingResponse(request_body=BodyResponse(response=picked), dynamic_metadata=self._metadata)
            return
        headers = HeadersResponse(response=picked)
        yield ProcessingResponse(request_headers=headers, dynamic_metadata=self._metadata)
        for start in range(0, max(1, len(body)), PIECE_BYTES):
            end = start + PIECE_BYTES >= len(body)
            part = StreamedBodyResponse(body=body[start : start + PIECE_BYTES], end_of_stream=end)
            mutation = BodyMutation(streamed_response=part)
            yield ProcessingResponse(request_body=BodyResponse(response=CommonResponse(body_mutation=mutation)))

    def _drop_body(self) -> None:
        self._bodies.held -= len(self._body)
        self._body.clear()

    async def _picked(self) -> CommonResponse:
        """Pick engines; note them for the metadata.

        Raises:
            MoonpoolError: the request is wrong, or is refused.
        """
        message = await self._dispatcher.run("", partial(read_body, bytes(self._body), self._headers))
        addresses = {
            member.id: member.http_address
            for member in self._registry.of_kind(kv_pb2.INSTANCE_KIND_PREFILL)
            if member.http_address and (self._allowed is None or member.http_address in self._allowed)
        }
        if not addresses:
            raise Unavailable(
                "no engine with an HTTP server of its own has joined, or none of those that may be chosen"
            )
        others = [
            instance.id
            for instance in self._registry.of_kind(kv_pb2.INSTANCE_KIND_PREFILL)
            if instance.id not in addresses
        ]
        found = await self._dispatcher.pick_endpoint(message, others, PLACE_LIMIT_S)
        self._number = found.request
        self._places = list(dict.fromkeys([addresses[engine] for engine in found.engines if engine in addresses]))
        places = ",".join(self._places)
        self._metadata = Struct()
        self._metadata.update({PICK_NAMESPACE: {DESTINATION: places}})
        header = HeaderValue(key=DESTINATION, raw_value=places.encode())
        option = HeaderValueOption(header=header, append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        return CommonResponse(header_mutation=HeaderMutation(set_headers=[option]), clear_route_cache=True)

    def _note_served(self, message: ProcessingRequest) -> None:
        """Read which engine the proxy took: from the metadata, as version 1.0 of the protocol says, or a header."""
        told = message.metadata_context.filter_metadata.get(PICK_NAMESPACE)
        served = told.fields[SERVED].string_value if told is not None and SERVED in told.fields else ""
        served = served or _text_headers(message.response_headers).get(SERVED, "")
        if not served or not self._places:
            return
        first = served == self._places[0]
        if not first:
            log.info("a proxy took another engine", picked=self._places[0], served=served)
        self._on_served(first)

    def _passed_on(self, message: ProcessingRequest) -> BodyResponse:
        if self._modes[1] != FULL_DUPLEX:
            return BodyResponse()
        piece = message.response_body
        part = StreamedBodyResponse(body=piece.body, end_of_stream=piece.end_of_stream)
        return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=part)))


def refusal(error: MoonpoolError) -> ImmediateResponse:
    """Return the answer for the client: an error as OpenAI's interface has them, with our reason."""
    headers: dict[str, str] = {"content-type": "application/json"}
    code, kind, reason = 503, "server_error", "unavailable"
    match error:
        case Overloaded():
            code, kind, reason = 429, "rate_limit_error", error.reason
            if error.retry_after_s > 0:
                headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        case _BodyTooLargeError():
            code, kind, reason = 413, "invalid_request_error", "body_too_large"
        case InvalidRequest() | NotFound():
            code, kind, reason = 400, "invalid_request_error", "invalid_request"
        case _:
            log.warning("no engine for a proxy's request", error=str(error))
    body = {"error": {"message": str(error), "type": kind, "code": reason}}
    options = [
        HeaderValueOption(
            header=HeaderValue(key=key, raw_value=value.encode()),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for key, value in headers.items()
    ]
    return ImmediateResponse(
        status=HttpStatus(code=code),
        headers=HeaderMutation(set_headers=options),
        body=json.dumps(body).encode(),
        details=reason,
    )


def _allowed(message: ProcessingRequest) -> frozenset[str] | None:
    """Return the addresses that may be chosen, as the proxy says; None = all."""
    hint = message.metadata_context.filter_metadata.get(HINT_NAMESPACE)
    if hint is None or DESTINATIONS_ALLOWED not in hint.fields:
        return None
    value = hint.fields[DESTINATIONS_ALLOWED]
    if value.WhichOneof("kind") == "string_value":
        return frozenset(part.strip() for part in value.string_value.split(","))
    return frozenset(value.string_value for value in value.list_value.values)


def _text_headers(headers: HttpHeaders) -> dict[str, str]:
    return {
        header.key.lower(): header.value or header.raw_value.decode("latin-1") for header in headers.headers.headers
    }
