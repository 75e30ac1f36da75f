"""The SDK's conductor clients: `AsyncClient` for asyncio, and `Client`, its blocking facade."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

from google.protobuf.message import Message

from moonpool.base.errors import MoonpoolError, NotFound
from moonpool.base.rpc.tls import Tls
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.client import translate
from moonpool.client.background import BackgroundLoop, BlockingFacade, blocking, same_arguments
from moonpool.client.cluster_state import ClusterState, GaugeValue, LoraInfo
from moonpool.client.contexts import DELETE_TIMEOUT_S, AsyncContexts, Contexts, DeletedKV, delete_request, deleted_kv
from moonpool.client.explain import Explanation
from moonpool.client.failover import ConductorFailover, ConductorList, loop_time, pause_before_retry, remaining_s
from moonpool.client.token_stream import AsyncTokenStream, StreamTimeouts, TokenStream
from moonpool.client.transport import ConductorTransport, GrpcTransport, NotConnected
from moonpool.client.types import GenerateArguments, GenerateResult
from moonpool.v1 import conductor_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 10.0
OTHER_STATE_S = 0.5
LORA_TIMEOUT_S = 150.0
RESUME_TIMEOUT_S = 30.0
SILENCE_S = 1.0


class AsyncClient:
    """A client of a conductor for asyncio; an async context manager. Use a client on one event loop.

    If the conductor or a stream's connection is lost, the client resumes the stream there or at another address,
    without missing or repeated tokens.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        silence_s: float = SILENCE_S,
        tls: Tls | None = None,
        api_key: str = "",
        transport: ConductorTransport | Sequence[ConductorTransport] | None = None,
    ) -> None:
        """Talk to the conductor at `address`. The client connects on first use.

        Args:
            address: "host:port", or several addresses: requests are spread over the conductors, a session's requests
                go to one of them, and the client tries the next if a conductor cannot be reached.
            timeout_s: default time limit for a request, in seconds.
            connect_timeout_s: seconds for which the client retries conductors that cannot be reached.
            resume_timeout_s: seconds for which the client tries to resume a lost stream; 0: never resume.
            silence_s: seconds after which a connected conductor that does not even answer a health check counts as
                lost; 0: never. Used only with several addresses.
            tls: certificates. Default: the files that MOONPOOL_TLS_CA, MOONPOOL_TLS_CERT and MOONPOOL_TLS_KEY name, or
                no TLS if MOONPOOL_TLS_CA is not set.
            api_key: API key, sent over TLS only. Default: MOONPOOL_API_KEY.
            transport: replaces gRPC in tests; `address` is then ignored.

        Raises:
            InvalidRequest: no address is given.
            ConfigError: a certificate cannot be read.
        """
        addresses = [address] if isinstance(address, str) else list(address)
        if transport is None:
            tls, key = tls or Tls.from_environment(), api_key or os.environ.get("MOONPOOL_API_KEY", "")
            silence_s = silence_s if len(addresses) > 1 else 0.0
            transport = [GrpcTransport(target, tls, key, silence_s) for target in addresses]
            self._conductors = ConductorList(transport, addresses)
        else:
            self._conductors = ConductorList(transport if isinstance(transport, Sequence) else [transport])
        self._timeouts = StreamTimeouts(timeout_s, connect_timeout_s, resume_timeout_s)
        self.contexts = AsyncContexts(self._query)
        """Named contexts: create, list, get, update, delete."""

    async def generate(self, **request: Unpack[GenerateArguments]) -> GenerateResult:
        """Generate the whole answer; give exactly one of `prompt`, `token_ids` and `messages`.

        The answer arrives in few messages, which costs every service less than `stream`.

        Args:
            request: see `GenerateArguments`.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: no placement keeps the SLO; has the reason, the prediction and the time to retry.
            Unavailable: no instance can serve the request, or the conductor cannot be reached.
            DeadlineExceeded: the request took longer than `timeout_s`.
        """
        stream = self._stream(request, lambda: None, whole=True)
        async for _ in stream:
            pass
        assert stream.result is not None, "a stream that ended has a result"
        return stream.result

    def stream(
        self,
        *,
        on_placed: Callable[[], None] = lambda: None,
        whole: bool = False,
        **request: Unpack[GenerateArguments],
    ) -> AsyncTokenStream:
        """Like `generate`, token by token: iterate over the returned stream, which also raises the errors.

        `on_placed` is called before the first token, and again each time the request moves to another instance. The
        stream's `request_id`, `prompt_tokens` and `placement` are known then. With `whole`, tokens come about once a
        second and at the end, which costs every service less.

        Raises:
            InvalidRequest: an argument cannot be sent; names the field.
        """
        return self._stream(request, on_placed, whole=whole)

    def _stream(self, request: GenerateArguments, on_placed: Callable[[], None], *, whole: bool) -> AsyncTokenStream:
        timeout_s = request.get("timeout_s")
        timeouts = self._timeouts if timeout_s is None else replace(self._timeouts, request_s=timeout_s)
        return AsyncTokenStream(self._conductors, translate.generate_request(request, whole=whole), timeouts, on_placed)

    async def cluster_state(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> ClusterState:
        """Return the cluster's state according to a conductor, with the requests of all conductors.

        A conductor that does not answer within half a second more is left out.
        """
        request = conductor_pb2.ClusterStateRequest()
        state = await self._query(request, timeout_s)
        others = [number for number in range(len(self._conductors)) if number != self._conductors.first]
        answers = await asyncio.gather(*(self._other_state(number, request) for number in others))
        return translate.cluster_state(translate.with_requests(state, [answer for answer in answers if answer]))

    async def _other_state(
        self, number: int, request: conductor_pb2.ClusterStateRequest
    ) -> conductor_pb2.ClusterStateResponse | None:
        """What a further conductor says; None if it is late or lost."""
        try:
            async with asyncio.timeout(OTHER_STATE_S):
                answer: conductor_pb2.ClusterStateResponse = await self._conductors[number].query(
                    request, OTHER_STATE_S
                )
                return answer
        except (MoonpoolError, TimeoutError):
            return None

    async def change_role(self, instance_id: str, kind: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        """Ask an engine instance to drain and to restart as "prefill" or "decode". Does not wait for the restart.

        Raises:
            NotFound: no such instance has joined.
            InvalidRequest: the instance cannot have this role; names the field.
        """
        await self._query(translate.change_role(instance_id, kind), timeout_s)

    async def drain(self, instance_id: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        """Ask an instance to take nothing new. What runs there ends, or goes on elsewhere; does not wait for that.

        Raises:
            NotFound: no such instance has joined.
            InvalidRequest: the instance is the last engine of its kind that takes requests.
        """
        await self._query(conductor_pb2.DrainInstanceRequest(instance_id=instance_id), timeout_s)

    async def load_lora_adapter(
        self, lora_name: str, lora_path: str, *, load_inplace: bool = False, timeout_s: float = LORA_TIMEOUT_S
    ) -> LoraInfo:
        """Load a LoRA adapter at all engines: from then on, requests may name the adapter as `model`.

        `lora_path` is a folder in PEFT's format, in or below the conductor's `lora_folder`. With `load_inplace`, an
        adapter with this name is replaced.

        Raises:
            InvalidRequest: the name is taken, the path is not allowed, or the adapter cannot be computed; names the
                field.
            Unavailable: no prefill or no decode instance could load the adapter.
        """
        request = translate.load_lora_adapter(lora_name, lora_path, load_inplace=load_inplace)
        answer: conductor_pb2.LoadLoraAdapterResponse = await self._query(request, timeout_s)
        return translate.from_message(LoraInfo, answer.lora)

    async def unload_lora_adapter(self, lora_name: str, *, timeout_s: float = LORA_TIMEOUT_S) -> None:
        """Unload a LoRA adapter. Requests that have begun go on.

        Raises:
            NotFound: no adapter with this name is loaded.
        """
        await self._query(translate.unload_lora_adapter(lora_name), timeout_s)

    async def explain(self, request_id: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> Explanation:
        """Return how a request was placed and why. Conductors are asked one after the other until one knows.

        Raises:
            NotFound: no conductor knows the request, or not any more.
        """
        request = conductor_pb2.ExplainRequest(request_id=request_id)
        first, deadline = self._conductors.first, loop_time() + timeout_s
        unknown: NotFound | None = None
        for number in [*range(first, len(self._conductors)), *range(first)]:
            try:
                return translate.explanation(await self._conductors[number].query(request, remaining_s(deadline)))
            except NotFound as error:
                unknown = error
            except NotConnected:
                continue
        if unknown is not None:
            raise unknown
        return translate.explanation(await self._query(request, remaining_s(deadline)))

    async def update_session(
        self, session: SessionTurn, *, tenant: str = "", timeout_s: float = QUERY_TIMEOUT_S
    ) -> bool:
        """Tell what is known about a session now: the end (`last`), or when the next request is expected.

        Times are from now on. Returns whether the conductor knows the session.

        Raises:
            InvalidRequest: a value is wrong; names the field.
        """
        request = conductor_pb2.UpdateSessionRequest(tenant=tenant, session=translate.session_to_proto(session))
        at = self._conductors.choose(tenant, session.id)
        answer: conductor_pb2.UpdateSessionResponse = await self._query(request, timeout_s, at)
        return answer.found

    async def announce(
        self,
        requests: Sequence[GenerateArguments],
        within_s: float | None,
        *,
        tenant: str = "",
        timeout_s: float = QUERY_TIMEOUT_S,
    ) -> int:
        """Tell which prompts will come within so many seconds, such as a batch's prompts: their KV is brought nearer.

        With None in place of the seconds, the prompts will not come after all. Returns how many have at least one full
        block of KV.

        Args:
            requests: for each request, the arguments of `generate`, or the prompt alone.
            within_s: seconds from now.
            tenant: whose prompts.
            timeout_s: time limit, in seconds.

        Raises:
            InvalidRequest: a value is wrong; names the field.
        """
        prompts = 0
        for messages in translate.in_portions([translate.generate_request(given) for given in requests]):
            request = conductor_pb2.AnnouncePromptsRequest(tenant=tenant, requests=messages, within_s=within_s)
            answer: conductor_pb2.AnnouncePromptsResponse = await self._query(request, timeout_s)
            prompts += answer.prompts
        return prompts

    async def stats(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> tuple[GaugeValue, ...]:
        """Return the conductor's gauges."""
        request = conductor_pb2.ConductorStatsRequest()
        return translate.gauges(await self._query(request, timeout_s))

    async def delete_kv(
        self,
        *,
        keys: Sequence[bytes] = (),
        tenants: Sequence[str] = (),
        namespaces: Sequence[bytes] = (),
        timeout_s: float = DELETE_TIMEOUT_S,
    ) -> DeletedKV:
        """Delete KV from every tier on every instance: all blocks that an argument names.

        A deletion runs once, even if the client repeats the call at another conductor. The counts are those of the
        call that was answered.

        Raises:
            InvalidRequest: no argument names anything, or a key or namespace does not have 32 bytes.
        """
        return deleted_kv(await self._query(delete_request(keys, tenants, namespaces), timeout_s))

    async def aclose(self) -> None:
        """End all calls. Idempotent."""
        await self._conductors.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _query(self, request: Message, timeout_s: float, at: int | None = None) -> Any:
        """Call a conductor's method, first at the conductor that answered last, or at conductor `at`."""
        deadline = loop_time() + timeout_s
        first = self._conductors.first if at is None else at
        failover = ConductorFailover(self._conductors, self._timeouts.connect_s, first)
        while True:
            try:
                answer = await failover.transport.query(request, remaining_s(deadline))
            except NotConnected:
                await pause_before_retry(failover.failed(), deadline)
            else:
                failover.found()
                if at is None:
                    self._conductors.first = failover.number
                return answer


class Client(BlockingFacade[AsyncClient]):
    """A client of a conductor for blocking code; a context manager. Several threads may use a client.

    Every call has the arguments of `AsyncClient`'s call with the same name. KeyboardInterrupt cancels a call.
    """

    @same_arguments(AsyncClient.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(AsyncClient(*args, **options), BackgroundLoop())
        self.contexts = Contexts(self._target.contexts, self._loop)
        """Named contexts: create, list, get, update, delete."""

    generate = blocking(AsyncClient.generate)
    cluster_state = blocking(AsyncClient.cluster_state)
    change_role = blocking(AsyncClient.change_role)
    drain = blocking(AsyncClient.drain)
    load_lora_adapter = blocking(AsyncClient.load_lora_adapter)
    unload_lora_adapter = blocking(AsyncClient.unload_lora_adapter)
    explain = blocking(AsyncClient.explain)
    update_session = blocking(AsyncClient.update_session)
    announce = blocking(AsyncClient.announce)
    stats = blocking(AsyncClient.stats)
    delete_kv = blocking(AsyncClient.delete_kv)

    def stream(self, **request: Unpack[GenerateArguments]) -> TokenStream:
        """Like `generate`, token by token: iterate over the returned stream, which also raises the errors."""
        return TokenStream(self._target.stream(**request), self._loop)

    def close(self) -> None:
        """End all calls and the background thread. Idempotent."""
        self._loop.close(self._target.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
