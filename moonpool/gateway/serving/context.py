"""What every handler of the gateway works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.base.checkpoint.pooling import Pooling
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.client import AsyncClient, ClusterState
from moonpool.gateway.serving.auth import Authenticator
from moonpool.gateway.serving.cluster_state import ClusterStateCache
from moonpool.gateway.serving.embedding_sizes import WHOLE, EmbeddingSizes
from moonpool.gateway.serving.generation_job import GenerationJob
from moonpool.gateway.serving.generation_response import AnswerTurns, GenerationResponse
from moonpool.gateway.serving.metrics import GatewayMetrics
from moonpool.gateway.serving.next_turn import NextTurns
from moonpool.gateway.serving.pictures import PictureReader
from moonpool.gateway.serving.request_builder import RequestBuilder
from moonpool.gateway.serving.request_log import RequestLog
from moonpool.gateway.serving.response_formatter import ResponseFormatter
from moonpool.gateway.serving.scrapes import Scrapes
from moonpool.gateway.serving.tokenizer import GatewayTokenizer


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """What every handler works with: one object for each gateway process.

    Attributes:
        client: the SDK's client of the conductor.
        auth: checks API keys and budgets, and reads bodies.
        cluster: the model that is served, and the instances.
        tokenizer: tokenizer and chat template of the served model.
        builder: builds generation jobs from bodies.
        metrics: counters and timers of requests.
        log: lines for requests.
        scrapes: answers `/metrics`.
        wall_clock: returns seconds since 1970.
        rendering: a thread that renders answers for the page, by turns of tenants.
        pictures: looks at the pictures of requests.
        next_turns: computes what next turns begin with.
        turns: turns of tenants for prompts of lists, and for what is costly to write.
        started_at: when the gateway started, in seconds since 1970.
        embedding_sizes: sizes to which embeddings may be cut.
        pooling: what the served model makes of whole prompts; None: it answers with text.
        served_names: names under which clients know the model; none = the checkpoint's name.
    """

    client: AsyncClient
    auth: Authenticator
    cluster: ClusterStateCache
    tokenizer: GatewayTokenizer
    builder: RequestBuilder
    metrics: GatewayMetrics
    log: RequestLog
    scrapes: Scrapes
    wall_clock: Callable[[], float]
    rendering: TenantTurns
    pictures: PictureReader
    next_turns: NextTurns
    started_at: int
    turns: AnswerTurns
    served_names: Sequence[str] = ()
    embedding_sizes: EmbeddingSizes = WHOLE
    pooling: Pooling | None = None

    @property
    def classifier(self) -> Pooling | None:
        """What the served model makes of whole prompts, if it classifies them; else None."""
        return self.pooling if self.pooling is not None and self.pooling.task == "classify" else None

    def shown_name(self, state: ClusterState) -> str:
        """The model's name in responses: the first in `served_names`, else the checkpoint's."""
        return self.served_names[0] if self.served_names else state.model

    async def max_model_len(self) -> int:
        """Most tokens in a sequence for the served model.

        Raises:
            Mismatch: the cluster serves another model than the gateway's tokenizer is for.
        """
        state = await self.cluster.state()
        self.tokenizer.check_model(state.model)
        return state.max_tokens

    def generate(self, job: GenerationJob, formatter: ResponseFormatter) -> GenerationResponse:
        """A response that runs `job` and writes the answer with `formatter`."""
        job.charge_request()
        return GenerationResponse(self.client, self.metrics, self.turns, self.pictures, job, formatter)
