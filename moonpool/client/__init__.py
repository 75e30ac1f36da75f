"""The client SDK: `Client` for blocking code and `AsyncClient` for asyncio, with the same calls.

    from moonpool.client import Client, SamplingParams

    with Client("127.0.0.1:50051") as client:
        answer = client.generate(prompt="...", sampling=SamplingParams(max_tokens=64, temperature=0.0))
        print(answer.text, answer.usage.cached_tokens)
        for event in client.stream(token_ids=[1, 2, 3]):
            print(event.text, end="")

Errors are those of `moonpool.base.errors`.
"""

from moonpool.base.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Mismatch,
    MoonpoolError,
    NotFound,
    Overloaded,
    StreamBroken,
    TransferFailed,
    Unavailable,
    Unsupported,
)
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.pictures.files import Picture, own_picture
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.client.client import AsyncClient, Client
from moonpool.client.cluster_state import ClusterState, GaugeValue, InstanceInfo, LoraInfo
from moonpool.client.contexts import AsyncContexts, Context, Contexts, DeletedKV, InstanceDeletion
from moonpool.client.explain import Attempt, Candidate, Explanation
from moonpool.client.token_stream import AsyncTokenStream, TokenStream
from moonpool.client.types import (
    Choice,
    FinishReason,
    GenerateArguments,
    GenerateResult,
    Message,
    MessagePart,
    Placement,
    Slo,
    Timing,
    TokenEvent,
    ToolCall,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncContexts",
    "AsyncTokenStream",
    "Attempt",
    "Candidate",
    "Choice",
    "Client",
    "ClusterState",
    "Context",
    "Contexts",
    "DeadlineExceeded",
    "DeletedKV",
    "Explanation",
    "FinishReason",
    "GaugeValue",
    "GenerateArguments",
    "GenerateResult",
    "InstanceDeletion",
    "InstanceInfo",
    "Internal",
    "InvalidRequest",
    "LoraInfo",
    "Message",
    "MessagePart",
    "Mismatch",
    "MoonpoolError",
    "NotFound",
    "Overloaded",
    "Picture",
    "Placement",
    "SamplingParams",
    "SessionTurn",
    "Slo",
    "StreamBroken",
    "Timing",
    "TokenEvent",
    "TokenLogprobs",
    "TokenStream",
    "ToolCall",
    "TransferFailed",
    "Unavailable",
    "Unsupported",
    "Usage",
    "own_picture",
]
