"""OpenAI's `/v1/embeddings`, and what every endpoint with embeddings shares."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from starlette.requests import Request

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import GenerateResult, TokenEvent
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.body import FailFastList, Integer
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.embedding_sizes import cut
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.generate_body import GenerateBody
from moonpool.gateway.serving.generation_job import GenerationJob
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.merged_stream import results_of
from moonpool.gateway.serving.response_formatter import ResponseFormatter

MAX_INPUTS = 2048
"""Inputs per request, as OpenAI's limit."""


_IGNORED = ("keep_alive", "metadata", "request_id", "rid", "user")
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "bytes_only": (False,),
    "chat_template": (),
    "dimensions": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "input_type": (),
    "lora_path": (),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "normalize": (True,),
    "options": ({},),
    "truncate": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_activation": (True,),
}


class EmbeddingBody(GenerateBody):
    """A body with texts that are embedded."""

    ignored: ClassVar[Collection[str]] = _IGNORED
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.0, embedding=True)


class InputsBody(EmbeddingBody):
    """A body with inputs, each of which is one prompt."""

    what: ClassVar[str]
    """What is made of the inputs, for errors."""

    input: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
    add_special_tokens: bool | None = None

    def check(self) -> None:
        if self.stream:
            raise InvalidRequest("stream", f"{self.what} are not streamed")
        inputs = self.inputs()
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise InvalidRequest("input", f"must be 1 to {MAX_INPUTS} inputs")
        if not all(inputs):
            raise InvalidRequest("input", "an input must not be empty")

    def inputs(self) -> list[str | list[int]]:
        """The inputs, each as text or as token ids."""
        match self.input:
            case str() | [int(), *_]:
                return [self.input]  # type: ignore[list-item]
        return list(self.input)  # type: ignore[arg-type]


class EmbeddingsBody(InputsBody):
    """Body of `/v1/embeddings`."""

    what = "embeddings"

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None


async def embeddings(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Embed one or more inputs."""
    checked = await gateway.auth.read_body(request, EmbeddingsBody)
    body = checked.body
    if gateway.classifier is not None:
        raise InvalidRequest("input", "the served model classifies texts and has no embeddings: see /v1/classify")
    if body.dimensions is not None:
        gateway.embedding_sizes.check(body.dimensions)
    job = await inputs_job(gateway, checked)
    as_text = body.encoding_format == "base64"
    return gateway.generate(job, EmbeddingsFormatter(job.model_name, as_text=as_text, dimensions=body.dimensions))


async def inputs_job(gateway: GatewayContext, checked: CheckedRequest[Any]) -> GenerationJob:
    """A job with a prompt for each input of a body.

    Raises:
        InvalidRequest: an input is too long.
    """
    body: InputsBody = checked.body
    job = gateway.builder.prepare(checked, await gateway.cluster.state(), max_tokens=1)  # engines compute at least one
    job.prompts = [{"prompt": given} if isinstance(given, str) else {"token_ids": given} for given in body.inputs()]
    job.prompt_field = "input"
    if body.add_special_tokens is False:
        job.replace_prompts(await gateway.builder.prompt_token_ids(job, special=False))
    return job


class EmbeddingFormatter(ResponseFormatter):
    """Writes a response from embeddings, which is never streamed."""

    def start(self, request_id: str, *, emulated: bool) -> None:
        del request_id, emulated

    def first_events(self) -> Iterator[bytes]:
        return iter(())

    def add_tokens(self, event: TokenEvent) -> None:
        del event

    def text_event(self, text: str, choice: int) -> bytes:
        return b""

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        return iter(())

    def error_event(self, error: ErrorResponse) -> bytes:
        return b""

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        return error.body()


class EmbeddingsFormatter(EmbeddingFormatter):
    """Writes the list of embeddings."""

    def __init__(self, model: str, *, as_text: bool, dimensions: int | None = None) -> None:
        """Write embeddings.

        Args:
            model: the name in the response.
            as_text: embeddings are base64 of little-endian float32.
            dimensions: values that are kept of each embedding; None = all.
        """
        self._model, self._dimensions = model, dimensions
        self._as_text = as_text

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        tokens = result.usage.prompt_tokens
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._written(embedded.embedding)}
                for index, embedded in enumerate(results_of(result))
            ],
            "model": self._model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _written(self, embedding: Sequence[float]) -> list[float] | str:
        embedding = cut(embedding, self._dimensions)
        if not self._as_text:
            return list(embedding)
        numbers = array.array("f", embedding)
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()
