"""Talks to a running stack in bytes, as any client might: ours or not, right or wrong.

`Stack` also checks that the stack was not harmed.
"""

import contextlib
import dataclasses
import queue
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from moonpool.base.kv.keys import block_keys, chain_root, pack_keys, tokens_to_bytes
from moonpool.base.rpc.errors import DETAIL_KEY
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import read_gauges, wait_at_rest
from moonpool.cli.stack import StackPlan
from moonpool.client import Client
from moonpool.v1 import calls_pb2, conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2, prefill_pb2
from tests.integration.conftest import BLOCK, tokens
from tests.integration.stack import CheckedStack

DEADLINE_S = 30.0
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)

SERVICES: dict[str, ServiceDescriptor] = {
    "conductor": conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"],
    "prefill": prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
    "decode": decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
    "kvstore": kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"],
}
METHODS: dict[str, MethodDescriptor] = {
    f"{kind}.{method.name}": method for kind, service in SERVICES.items() for method in service.methods
} | {"conductor.Carry": calls_pb2.DESCRIPTOR.services_by_name["CallsService"].methods_by_name["Carry"]}
"""Every RPC of every service, by "service.Method"; what all services have is called at one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: its answers, status, text, and the structured detail if there was one."""

    answers: list[Any]
    code: grpc.StatusCode
    text: str = ""
    detail: kv_pb2.ErrorDetail | None = None

    @property
    def field(self) -> str:
        """The field at fault."""
        return self.detail.field if self.detail is not None else ""


def request_class(method: MethodDescriptor) -> type[Message]:
    """Class of a method's request."""
    return message_factory.GetMessageClass(method.input_type)


def encoded(message: Message | bytes) -> bytes:
    """Bytes of a message; bytes as they are."""
    return message if isinstance(message, bytes) else message.SerializeToString()


class Stream:
    """A bidirectional call, message by message."""

    def __init__(self, channel: Any, method: MethodDescriptor, timeout_s: float) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        parse = message_factory.GetMessageClass(method.output_type).FromString
        open_call = channel.stream_stream(_path(method), None, parse)
        self._call: Any = open_call(iter(self._requests.get, None), timeout=timeout_s)

    def send(self, *messages: Message | bytes) -> None:
        """Sends messages."""
        for message in messages:
            self._requests.put(encoded(message))

    def read(self) -> Any:
        """The next answer; raises when the stream has ended."""
        return next(self._call)

    def finish(self) -> Outcome:
        """Sends no more and takes what still comes."""
        self._requests.put(None)
        return _drained(self._call)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._call.cancel()


class Stack:
    """A running stack, and calls of each of its services with valid and invalid messages."""

    def __init__(self, stack: CheckedStack) -> None:
        self.stack = stack
        self.client = Client(stack.address)
        self._channels: dict[str, grpc.Channel] = {}
        self._offsets: dict[Path, int] = {}
        state: conductor_pb2.ClusterStateResponse
        state = self.call("conductor.ClusterState", conductor_pb2.ClusterStateRequest()).answers[0]
        self.instances = {member.instance.id: member.instance for member in state.instances}
        self.model = state.model
        self.prompt = tokens(3 * BLOCK + 5, "good")
        self.expected = self.client.generate(token_ids=self.prompt, sampling=GREEDY).token_ids
        self._promised: list[decode_pb2.CancelSequence] = []
        self._pids = {service.id: service.pid for service in stack.services.values()}
        self.check_unharmed()

    def close(self) -> None:
        """Ends all connections."""
        self.client.close()
        for channel in self._channels.values():
            channel.close()

    def address(self, kind: str) -> str:
        """Where the first service of a kind listens."""
        return self.stack.address if kind == "conductor" else self.instances[f"{kind}-0"].address

    def channel(self, kind: str) -> grpc.Channel:
        """A channel without any limit of its own."""
        if kind not in self._channels:
            options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
            self._channels[kind] = grpc.insecure_channel(self.address(kind), options=options)
        return self._channels[kind]

    def stream(self, name: str, *first: Message | bytes, timeout_s: float = DEADLINE_S) -> Stream:
        """Opens "service.Method" and sends the first messages."""
        stream = Stream(self.channel(name.split(".")[0]), METHODS[name], timeout_s)
        stream.send(*first)
        return stream

    def call(
        self, name: str, *messages: Message | bytes, answers: int = 10_000, timeout_s: float = DEADLINE_S
    ) -> Outcome:
        """Calls "service.Method" with everything there is to send, and takes so many answers at most."""
        method = METHODS[name]
        channel: Any = self.channel(name.split(".")[0])  # typeshed knows no calls in bytes
        parse = message_factory.GetMessageClass(method.output_type).FromString
        requests = [encoded(message) for message in messages]
        if method.client_streaming:
            return _drained(
                channel.stream_stream(_path(method), None, parse)(iter(requests), timeout=timeout_s), answers
            )
        if method.server_streaming:
            return _drained(channel.unary_stream(_path(method), None, parse)(requests[0], timeout=timeout_s), answers)
        try:
            answer = channel.unary_unary(_path(method), None, parse)(requests[0], timeout=timeout_s)
        except grpc.RpcError as error:
            return _failed([], error)
        if name == "decode.Reserve":
            request_id = decode_pb2.ReserveRequest.FromString(requests[0]).sequence.request_id
            ids = {"transfer_id": answer.target.transfer_id, "generation": answer.target.generation}
            self._promised.append(decode_pb2.CancelSequence(request_id=request_id, **ids))
        return Outcome([answer], grpc.StatusCode.OK)

    def hello(self) -> kv_pb2.StreamHello:
        """A proper first message of a KV stream."""
        sender = kv_pb2.Instance(id="raw", epoch=1, kind=kv_pb2.INSTANCE_KIND_PREFILL, address="127.0.0.1:1")
        return kv_pb2.StreamHello(sender=sender, namespace=self.model.namespace, layout=self.model.layout)

    def join_hello(self, kind: kv_pb2.InstanceKind.ValueType) -> conductor_pb2.JoinHello:
        """The hello of a valid instance at the address of a running one."""
        names = {kv_pb2.INSTANCE_KIND_PREFILL: "prefill", kv_pb2.INSTANCE_KIND_DECODE: "decode"}
        instance = kv_pb2.Instance(id="raw", epoch=1, kind=kind, address=self.address(names.get(kind, "kvstore")))
        model = self.model if kind in names else None
        return conductor_pb2.JoinHello(instance=instance, model=model, total_blocks=10)

    def first_message(self, name: str) -> Any:
        """A proper first message of a stream."""
        message: Any = request_class(METHODS[name])()
        if name == "conductor.Join":
            message.hello.CopyFrom(self.join_hello(kv_pb2.INSTANCE_KIND_KVSTORE))
        elif name == "decode.Steps":
            message.hello.conductor.id = "raw"
        elif name == "conductor.Carry":
            message.cancelled.append(1)
        else:
            message.hello.CopyFrom(self.hello())
        return message

    def spec(self, request_id: str, token_ids: Sequence[int], max_tokens: int = 4) -> kv_pb2.SequenceSpec:
        """A valid sequence of a tenant of its own, so that other requests' KV is not touched."""
        root = chain_root(self.model.namespace, "raw")
        return kv_pb2.SequenceSpec(
            request_id=request_id,
            token_ids=tokens_to_bytes(token_ids),
            prompt_tokens=len(token_ids),
            block_keys=pack_keys(block_keys(root, token_ids, BLOCK)),
            chain_root=root,
            tenant="raw",
            sampling=kv_pb2.Sampling(max_tokens=max_tokens, temperature=0.0),
        )

    def reserve(self, spec: kv_pb2.SequenceSpec) -> kv_pb2.TransferTarget:
        """A promise of room at decode."""
        outcome = self.call("decode.Reserve", decode_pb2.ReserveRequest(sequence=spec))
        assert outcome.code is grpc.StatusCode.OK, outcome
        target: kv_pb2.TransferTarget = outcome.answers[0].target
        return target

    def _give_back(self) -> None:
        """Cancels all promises since the last time, whatever has become of them."""
        hello = decode_pb2.StepsRequest(hello=decode_pb2.StepsHello())
        cancels = [decode_pb2.StepsRequest(cancel=promise) for promise in self._promised]
        self._promised.clear()
        assert self.call("decode.Steps", hello, *cancels).code is grpc.StatusCode.OK

    def gauge(self, instance: str, name: str) -> float:
        """A gauge's value now."""
        for reading in read_gauges(self.stack.address):
            if (reading.instance, reading.name) == (instance, name):
                return float(reading.value)
        raise AssertionError(f"{instance} has no gauge {name}")

    def check_unharmed(self) -> None:
        """Every process lives, a good request is right, nothing is held, and no log has a traceback."""
        for service in self.stack.services.values():
            assert service.returncode is None, f"{service.id} has ended\n{service.log_tail()}"
            assert service.pid == self._pids[service.id]
        assert self.client.generate(token_ids=self.prompt, sampling=GREEDY).token_ids == self.expected
        self._give_back()
        wait_at_rest(self.stack.address, timeout_s=60)
        assert not (found := "\n".join(self.tracebacks())), found

    def tracebacks(self) -> Iterator[str]:
        """Log lines since the last call that show a defect."""
        for service in self.stack.services.values():
            with service.log_path.open(errors="replace") as log:
                log.seek(self._offsets.get(service.log_path, 0))
                text = log.read()
                self._offsets[service.log_path] = log.tell()
            if any(word in text for word in ("Traceback", "call failed", "[error", "Task exception", "never awaited")):
                yield f"{service.id}: {text}"


@contextlib.contextmanager
def running(model: Path, data_dir: Path) -> Iterator[Stack]:
    """A small stack with short deadlines, one instance of each kind."""
    plan = StackPlan(
        model=str(model),
        data_dir=data_dir,
        dtype="float32",
        threads=1,
        block_size=BLOCK,
        kv_cache_memory_bytes=16 << 20,
        dram_bytes=16 << 20,
        ssd_bytes=64 << 20,
        extra={
            "prefill": ["--max-num-batched-tokens", "64", "--set", "verdict_timeout_s=3"],
            "kvstore": ["--set", "transfer_timeout_s=3", "--set", "room_timeout_s=1"],
        },
    )
    with CheckedStack(plan) as local:
        stack = Stack(local)
        try:
            yield stack
        finally:
            stack.close()


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _drained(call: Any, answers: int = 10_000) -> Outcome:
    taken: list[Any] = []
    try:
        for answer in call:
            taken.append(answer)
            if len(taken) >= answers:
                call.cancel()
                return Outcome(taken, grpc.StatusCode.OK)
    except grpc.RpcError as error:
        return _failed(taken, error)
    return Outcome(taken, grpc.StatusCode.OK)


def _failed(taken: list[Any], error: Any) -> Outcome:
    metadata: Iterable[tuple[str, Any]] = error.trailing_metadata() or ()
    details = [kv_pb2.ErrorDetail.FromString(value) for key, value in metadata if key == DETAIL_KEY]
    return Outcome(taken, error.code(), error.details() or "", details[0] if details else None)
