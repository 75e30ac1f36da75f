"""VLLM's `/score` and Jina's and Cohere's `/rerank`: how well pairs of texts belong together.

A model with one value for a text (a reranker, a reward model) scores each pair as one prompt. Of every other model the
score is the cosine of the two texts' embeddings, as in vLLM.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request

from moonpool.base import world
from moonpool.base.checkpoint.pooling import ScoreActivation
from moonpool.base.errors import InvalidRequest
from moonpool.client import GenerateResult
from moonpool.gateway.endpoints.embeddings import MAX_INPUTS, EmbeddingBody, EmbeddingFormatter
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.body import Body, FailFastList, Integer, TextOr
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.label_scores import label_scores
from moonpool.gateway.serving.merged_stream import results_of

Texts = str | FailFastList[str]


class TextsBody(EmbeddingBody):
    """A body with texts that are compared."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"instruction": (), "items": ()}

    second: ClassVar[str]
    """The field with the texts on the second side, for errors."""

    use_activation: bool | None = None

    def texts(self) -> list[str]:
        """The texts.

        Raises:
            InvalidRequest: a text is missing or empty, or there are too many; names the field.
        """
        raise NotImplementedError

    def pairs(self) -> list[tuple[int, int]]:
        """The pairs that are scored, as places in `texts`."""
        raise NotImplementedError

    def check(self) -> None:
        if self.stream:
            raise InvalidRequest("stream", "scores are not streamed")
        if len(self.texts()) > MAX_INPUTS:
            raise InvalidRequest("", f"a request has at most {MAX_INPUTS} texts")


class ScoreBody(TextsBody):
    """Body for `/score`: two texts or lists of texts, under one of vLLM's name pairs."""

    second = "text_2"

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

    def pairs(self) -> list[tuple[int, int]]:
        first, second = self.sides()
        return [(index % len(first), len(first) + index) for index in range(len(second))]


class DocumentBody(Body):
    """A document as an object."""

    text: str


class RerankBody(TextsBody):
    """Body of `/rerank`."""

    ignored = ("max_chunks_per_doc", "rank_fields")
    second = "documents"

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

    def pairs(self) -> list[tuple[int, int]]:
        return [(0, 1 + index) for index in range(len(self.documents))]


def _listed(name: str, given: str | list[str] | None) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts or not all(texts):
        raise InvalidRequest(name, "must be a text or texts, none of which is empty")
    return texts


async def scores(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Score pairs of texts."""
    checked = await gateway.auth.read_body(request, ScoreBody)
    return await while_connected(request.receive, _answered(gateway, checked, ScoreFormatter))


async def rerank(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Order documents by how well they fit a query."""
    checked = await gateway.auth.read_body(request, RerankBody)
    return await while_connected(request.receive, _answered(gateway, checked, RerankFormatter))


async def _answered(
    gateway: GatewayContext, checked: CheckedRequest[Any], formatter: type[PairsFormatter]
) -> GenerationResponse:
    """Score the pairs of a body: each pair by a model with one value, else by the embeddings of the texts.

    Raises:
        InvalidRequest: the model has several values for a text, or a text is too long.
    """
    body, state = checked.body, await gateway.cluster.state()
    classifier = gateway.classifier
    if classifier is not None and len(classifier.labels) > 1:
        what = f"the served model has {len(classifier.labels)} labels, and scores need a model with one"
        raise InvalidRequest(body.second, f"{what}: see /v1/classify")
    if classifier is None and body.use_activation is False:
        raise InvalidRequest("use_activation", "the scores are cosines of embeddings, which nothing is made of")
    job = gateway.builder.prepare(checked, state, max_tokens=1)
    texts, pairs = body.texts(), body.pairs()
    activation: ScoreActivation = "none"
    if classifier is None:
        job.prompts = [{"prompt": text} for text in texts]
    else:
        gateway.tokenizer.check_model(state.model)
        chosen = [(texts[first], texts[second]) for first, second in pairs]
        job.replace_prompts(
            await gateway.tokenizer.encode_pairs(checked.caller.tenant, body.second, chosen, state.max_tokens)
        )
        job.prompt_field = body.second
        activation = classifier.activation if body.use_activation is not False else "none"

    def scored(found: Sequence[Sequence[float]]) -> list[float]:
        if classifier is not None:
            return [label_scores(values, activation)[0] for values in found]
        return [cosine(found[first], found[second]) for first, second in pairs]

    return gateway.generate(job, formatter(job.model_name, body, scored))


class PairsFormatter(EmbeddingFormatter):
    """Writes a response from the scores of pairs."""

    def __init__(self, model: str, body: Any, scored: Callable[[Sequence[Sequence[float]]], list[float]]) -> None:
        """Write scores.

        Args:
            model: the name in the response.
            body: the request's body.
            scored: makes the pairs' scores of what the engines say of each prompt.
        """
        self._model, self._body, self._scored = model, body, scored
        self._request_id = ""

    def start(self, request_id: str, *, emulated: bool) -> None:
        self._request_id = request_id

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        tokens = result.usage.prompt_tokens
        found = self.written(self._scored([pooled.embedding for pooled in results_of(result)]))
        return {"model": self._model, **found, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    def written(self, scores: Sequence[float]) -> dict[str, Any]:
        """What the response says of the scores, one for each pair."""
        raise NotImplementedError


class ScoreFormatter(PairsFormatter):
    """Writes the scores of pairs."""

    def written(self, scores: Sequence[float]) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{self._request_id}", "object": "list", "created": int(world.unix_time())}
        return {**head, "data": data}


class RerankFormatter(PairsFormatter):
    """Writes documents in the order of their scores."""

    def written(self, scores: Sequence[float]) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        for index, (text, score) in enumerate(zip(self._body.texts()[1:], scores, strict=True)):
            shown = {} if self._body.return_documents is False else {"document": {"text": text}}
            found.append({"index": index, **shown, "relevance_score": score})
        found.sort(key=lambda row: -row["relevance_score"])
        return {"id": f"rerank-{self._request_id}", "results": found[: self._body.top_n or None]}


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine of two embeddings, which have length 1."""
    return math.fsum(map(operator.mul, first, second))
