"""VLLM's `/score` and Jina's and Cohere's `/rerank`: how near texts are, by the cosine of their embeddings.

vLLM scores this way with models without a score head, and every model served here is such a model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request

from moonpool.base import world
from moonpool.base.errors import InvalidRequest
from moonpool.client import GenerateResult
from moonpool.gateway.endpoints.embeddings import MAX_INPUTS, EmbeddingBody, EmbeddingFormatter
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.body import Body, FailFastList, Integer, TextOr
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.merged_stream import results_of

Texts = str | FailFastList[str]


class TextsBody(EmbeddingBody):
    """A body with texts that are compared."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"instruction": (), "items": ()}

    def texts(self) -> list[str]:
        """The texts.

        Raises:
            InvalidRequest: a text is missing or empty, or there are too many; names the field.
        """
        raise NotImplementedError

    def check(self) -> None:
        if self.stream:
            raise InvalidRequest("stream", "scores are not streamed")
        if len(self.texts()) > MAX_INPUTS:
            raise InvalidRequest("", f"a request has at most {MAX_INPUTS} texts")


class ScoreBody(TextsBody):
    """Body for `/score`: two texts or lists of texts, under one of vLLM's name pairs."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """The texts on both sides: as many, or one on the first.

        Raises:
            InvalidRequest: a side is missing, or the numbers of texts differ; names the field.
        """
        pairs = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
        given = [names for names in pairs if any(getattr(self, name) is not None for name in names)]
        if len(given) > 1:
            raise InvalidRequest(given[1][0], f"cannot be combined with {given[0][0]}")
        names = given[0] if given else pairs[0]
        first, second = (_listed(name, getattr(self, name)) for name in names)
        if len(first) not in (1, len(second)):
            raise InvalidRequest(names[0], f"must be one text, or as many as {names[1]}")
        return first, second

    def texts(self) -> list[str]:
        first, second = self.sides()
        return [*first, *second]


class DocumentBody(Body):
    """A document as an object."""

    text: str


class RerankBody(TextsBody):
    """Body of `/rerank`."""

    ignored = ("max_chunks_per_doc", "rank_fields")

    query: str
    documents: FailFastList[TextOr[DocumentBody]]
    top_n: Integer | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest("top_n", "must not be negative")

    def texts(self) -> list[str]:
        documents = [document if isinstance(document, str) else document.text for document in self.documents]
        return [*_listed("query", self.query), *_listed("documents", documents)]


def _listed(name: str, given: str | list[str] | None) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts or not all(texts):
        raise InvalidRequest(name, "must be a text or texts, none of which is empty")
    return texts


async def scores(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Score pairs of texts."""
    checked = await gateway.auth.read_body(request, ScoreBody)
    first, _ = checked.body.sides()
    return await _answered(gateway, checked, lambda model: ScoreFormatter(model, len(first)))


async def rerank(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Order documents by how near they are to a query."""
    checked = await gateway.auth.read_body(request, RerankBody)
    return await _answered(gateway, checked, lambda model: RerankFormatter(model, checked.body))


async def _answered(
    gateway: GatewayContext, checked: CheckedRequest[Any], formatter: Callable[[str], EmbeddingFormatter]
) -> GenerationResponse:
    """Embed the texts of a body; `formatter` takes the model's name."""
    job = gateway.builder.prepare(checked, await gateway.cluster.state(), max_tokens=1)
    job.prompts = [{"prompt": text} for text in checked.body.texts()]
    return gateway.generate(job, formatter(job.model_name))


class ComparingFormatter(EmbeddingFormatter):
    """Writes a response from the embeddings of texts that are compared."""

    def __init__(self, model: str) -> None:
        """`model` is the name in the response."""
        self._model = model
        self._request_id = ""

    def start(self, request_id: str, *, emulated: bool) -> None:
        self._request_id = request_id

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        tokens = result.usage.prompt_tokens
        compared = self.compared([embedded.embedding for embedded in results_of(result)])
        return {"model": self._model, **compared, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    def compared(self, embeddings: Sequence[Sequence[float]]) -> dict[str, Any]:
        """What the response says of the texts with these embeddings."""
        raise NotImplementedError


class ScoreFormatter(ComparingFormatter):
    """Writes the scores of pairs."""

    def __init__(self, model: str, num_first: int) -> None:
        """`num_first`: how many of the texts are on the first side."""
        super().__init__(model)
        self._num_first = num_first

    def compared(self, embeddings: Sequence[Sequence[float]]) -> dict[str, Any]:
        first, second = embeddings[: self._num_first], embeddings[self._num_first :]
        data = [
            {"index": index, "object": "score", "score": cosine(first[index % len(first)], embedding)}
            for index, embedding in enumerate(second)
        ]
        head = {"id": f"score-{self._request_id}", "object": "list", "created": int(world.unix_time())}
        return {**head, "data": data}


class RerankFormatter(ComparingFormatter):
    """Writes documents in the order of their scores."""

    def __init__(self, model: str, body: RerankBody) -> None:
        """`body` has the documents."""
        super().__init__(model)
        self._body = body

    def compared(self, embeddings: Sequence[Sequence[float]]) -> dict[str, Any]:
        query, *documents = embeddings
        found: list[dict[str, Any]] = []
        for index, (text, document) in enumerate(zip(self._body.texts()[1:], documents, strict=True)):
            shown = {} if self._body.return_documents is False else {"document": {"text": text}}
            found.append({"index": index, **shown, "relevance_score": cosine(query, document)})
        found.sort(key=lambda row: -row["relevance_score"])
        return {"id": f"rerank-{self._request_id}", "results": found[: self._body.top_n or None]}


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine of two embeddings, which have length 1."""
    return math.fsum(map(operator.mul, first, second))
