"""VLLM's `/classify` and `/pooling`: a classifier's labels and values, and what any model makes of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from moonpool.base import world
from moonpool.base.checkpoint.pooling import Pooling
from moonpool.base.errors import InvalidRequest
from moonpool.client import GenerateResult
from moonpool.gateway.endpoints.embeddings import EmbeddingFormatter, InputsBody, inputs_job
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.label_scores import label_scores
from moonpool.gateway.serving.merged_stream import results_of


class ClassifyBody(InputsBody):
    """Body of `/classify` and `/pooling`."""

    what = "classes"

    use_activation: bool | None = None


async def classify(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Tell the label and the value of every label for each input."""
    checked = await gateway.auth.read_body(request, ClassifyBody)
    classifier = gateway.classifier
    if classifier is None:
        raise InvalidRequest("input", "the served model is no classifier: its config.json names no such head")

    def row(index: int, values: Sequence[float]) -> dict[str, Any]:
        scores = _scores(classifier, values, checked.body)
        label = classifier.labels[max(range(len(scores)), key=scores.__getitem__)]
        return {"index": index, "label": label, "probs": scores, "num_classes": len(scores)}

    job = await inputs_job(gateway, checked)
    return gateway.generate(job, RowsFormatter(job.model_name, "classify", row))


async def pooling(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Tell what the model makes of each input: a classifier's values, or an embedding."""
    checked = await gateway.auth.read_body(request, ClassifyBody)
    classifier = gateway.classifier
    if classifier is None and checked.body.use_activation is False:
        raise InvalidRequest("use_activation", "an embedding has the length 1, and nothing else is made of it")

    def row(index: int, values: Sequence[float]) -> dict[str, Any]:
        found = list(values) if classifier is None else _scores(classifier, values, checked.body)
        return {"index": index, "object": "pooling", "data": found}

    job = await inputs_job(gateway, checked)
    return gateway.generate(job, RowsFormatter(job.model_name, "pool", row))


def _scores(classifier: Pooling, values: Sequence[float], body: ClassifyBody) -> list[float]:
    return label_scores(values, "none" if body.use_activation is False else classifier.activation)


class RowsFormatter(EmbeddingFormatter):
    """Writes a row for each input."""

    def __init__(self, model: str, prefix: str, row: Callable[[int, Sequence[float]], dict[str, Any]]) -> None:
        """Write rows.

        Args:
            model: the name in the response.
            prefix: what the response's id begins with.
            row: makes a row of an input's place and values.
        """
        self._model, self._prefix, self._row = model, prefix, row
        self._request_id = ""

    def start(self, request_id: str, *, emulated: bool) -> None:
        self._request_id = request_id

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        tokens = result.usage.prompt_tokens
        return {
            "id": f"{self._prefix}-{self._request_id}",
            "object": "list",
            "created": int(world.unix_time()),
            "model": self._model,
            "data": [self._row(index, pooled.embedding) for index, pooled in enumerate(results_of(result))],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
