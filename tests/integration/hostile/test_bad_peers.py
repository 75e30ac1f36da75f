"""Wrong peers: what instances tell each other and the conductor, with something wrong in it.

After every test of this file all processes live, a good request has its right answer, everything is at rest, and no log
has a traceback.
"""

import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from moonpool.base.kv.frames import checksum
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2
from tests.integration.conftest import BLOCK, tokens
from tests.integration.hostile.raw import Stack, Stream

CODES = grpc.StatusCode
INVALID, MISMATCH = CODES.INVALID_ARGUMENT, CODES.FAILED_PRECONDITION
VOCABULARY = 512


# --- frames at decode ------------------------------------------------------------------------------------------------


FRESH = itertools.count()


def reserve(
    stack: Stack, request_id: str = "raw", prompt: list[int] | None = None, max_tokens: int = 4
) -> kv_pb2.TransferTarget:
    """A promise for a prompt of three blocks that decode has never seen."""
    prompt = prompt or tokens(2 * BLOCK + 4, next(FRESH))
    return stack.reserve(stack.spec(request_id, prompt, max_tokens))


def verdict_on(stream: Stream) -> decode_pb2.TransferVerdict:
    """The next verdict; credits may come before it."""
    while not (answer := stream.read()).HasField("verdict"):
        assert answer.HasField("credit")
    verdict: decode_pb2.TransferVerdict = answer.verdict
    return verdict


def opening(target: kv_pb2.TransferTarget, **wrong: int) -> decode_pb2.ReceiveKVRequest:
    values: dict[str, Any] = {
        "transfer_id": target.transfer_id,
        "generation": target.generation,
        "decode_epoch": target.decode.epoch,
    }
    return decode_pb2.ReceiveKVRequest(open=decode_pb2.TransferOpen(**(values | wrong)))


def frame(
    stack: Stack,
    target: kv_pb2.TransferTarget,
    layer: int = 0,
    *,
    size: int | None = None,
    bad_sum: bool = False,
    bad_hash: bool = False,
    **wrong: int,
) -> decode_pb2.ReceiveKVRequest:
    """All of the prompt's blocks in one layer, right but for what is said to be wrong."""
    layout = KVLayout.from_proto(stack.model.layout)
    values = {"layer": layer, "block_count": 3, "head_end": layout.head_shares, "valid_tokens": 4}
    header = kv_pb2.FrameHeader(
        transfer=target.transfer_id,
        generation=wrong.pop("generation", target.generation),
        runs=[kv_pb2.SliceRun(**(values | wrong))],
    )
    payload = bytes(3 * layout.slice_bytes(0) if size is None else size)
    header.slice_hashes.extend(
        [slice_hash(payload[: layout.slice_bytes(0)]) ^ bad_hash] * max(1, min(3, (values | wrong)["block_count"]))
    )
    header.checksum = checksum(header) ^ bad_sum
    return decode_pb2.ReceiveKVRequest(frame=header, payload=payload)


BAD_FRAMES: list[tuple[str, dict[str, Any]]] = [
    ("wrong checksum", {"bad_sum": True}),
    ("wrong hash", {"bad_hash": True}),
    ("bytes, its runs need", {"size": 5}),
    ("bytes, its runs need", {"size": 0}),
    ("bytes, its runs need", {"block_count": (1 << 32) - 1}),
    ("valid tokens", {"first_block": 1}),
    ("not expected", {"first_block": (1 << 32) - 1, "valid_tokens": BLOCK}),
    ("no such layer", {"layer": 4}),
    ("no such heads", {"head_end": 99}),
    ("no such heads", {"head_begin": 2}),
    ("valid tokens", {"valid_tokens": 0}),
    ("valid tokens", {"valid_tokens": BLOCK}),
    ("no such layer or no blocks", {"block_count": 0, "size": 0}),
]


@pytest.mark.parametrize(("reason", "wrong"), BAD_FRAMES, ids=[case[0] for case in BAD_FRAMES])
def test_bad_frames(stack: Stack, reason: str, wrong: dict[str, Any]) -> None:
    """A wrong frame ends its transfer and no other on the same stream; nothing of it is used."""
    target, other = reserve(stack), reserve(stack, "other")
    hello = decode_pb2.ReceiveKVRequest(hello=stack.hello())
    with stack.stream("decode.ReceiveKV", hello, opening(target), opening(other)) as stream:
        assert stream.read().HasField("welcome")
        stream.send(frame(stack, target, **wrong))
        verdict = verdict_on(stream)
        assert (verdict.transfer_id, verdict.status) == (target.transfer_id, decode_pb2.TRANSFER_STATUS_FAILED)
        assert reason in verdict.reason
        stream.send(*(frame(stack, other, layer) for layer in range(stack.model.layout.layers)))
        verdict = verdict_on(stream)
        assert (verdict.transfer_id, verdict.status) == (other.transfer_id, decode_pb2.TRANSFER_STATUS_COMPLETE)
        assert stream.finish().code is CODES.OK


def test_frames_that_no_request_waits_for(stack: Stack) -> None:
    """Unknown transfer, wrong generation, before the opening: dropped and counted; the transfer itself goes on."""
    target = reserve(stack)
    strays = stack.gauge("decode-0", "stray_frames_total")
    unknown = kv_pb2.TransferTarget(transfer_id=1 << 63, generation=1)
    hello = decode_pb2.ReceiveKVRequest(hello=stack.hello())
    with stack.stream("decode.ReceiveKV", hello) as stream:
        assert stream.read().HasField("welcome")
        stream.send(frame(stack, unknown), frame(stack, target), opening(target))
        stream.send(frame(stack, target, generation=target.generation + 1))
        for wrong in ({"generation": target.generation + 1}, {"transfer_id": 1 << 63}, {"decode_epoch": 5}, {}):
            stream.send(opening(target, **wrong))
            assert verdict_on(stream).status == decode_pb2.TRANSFER_STATUS_FAILED
        stream.send(*(frame(stack, target, layer) for layer in range(stack.model.layout.layers)))
        assert verdict_on(stream).status == decode_pb2.TRANSFER_STATUS_COMPLETE
        assert stream.finish().code is CODES.OK
    assert stack.gauge("decode-0", "stray_frames_total") == strays + 3


def test_a_frame_of_many_runs(stack: Stack) -> None:
    """Some are the transfer's failure; so many that they cost something are the stream's, before they are parsed."""
    target = reserve(stack)
    run = kv_pb2.SliceRun(block_count=1, head_end=2, valid_tokens=BLOCK)
    header = kv_pb2.FrameHeader(transfer=target.transfer_id, generation=target.generation, runs=[run] * 2_000)
    hello = decode_pb2.ReceiveKVRequest(hello=stack.hello())
    with stack.stream("decode.ReceiveKV", hello, opening(target)) as stream:
        assert stream.read().HasField("welcome")
        stream.send(decode_pb2.ReceiveKVRequest(frame=header, payload=b"x"))
        assert "2000 runs, 0 slices" in verdict_on(stream).reason
        header.runs.extend([run] * 98_000)
        stream.send(decode_pb2.ReceiveKVRequest(frame=header, payload=b"x"))
        outcome = stream.finish()
        assert (outcome.code, outcome.text) == (CODES.DATA_LOSS, "ReceiveKVRequest has too many fields")


def test_steps_for_an_unknown_request_and_twice(stack: Stack) -> None:
    """Starts and cancels of what is not there are answered one by one; a second start of an id harms no other."""
    prompt = tokens(2 * BLOCK, "steps")
    max_tokens = 200  # so that the first still runs when the second start comes
    first, second = (reserve(stack, "same", prompt, max_tokens) for _ in range(2))
    hello = decode_pb2.ReceiveKVRequest(hello=stack.hello())
    with stack.stream("decode.ReceiveKV", hello, opening(first), opening(second)) as kv:
        for target in (first, second):
            for layer in range(stack.model.layout.layers):
                size = 2 * KVLayout.from_proto(stack.model.layout).slice_bytes(0)
                kv.send(frame(stack, target, layer, block_count=2, valid_tokens=BLOCK, size=size))
        assert kv.read().HasField("welcome")
        assert {verdict_on(kv).status for _ in range(2)} == {decode_pb2.TRANSFER_STATUS_COMPLETE}

        def start(target: kv_pb2.TransferTarget, request_id: str = "same", token: int = 9) -> decode_pb2.StepsRequest:
            sequence = decode_pb2.StartSequence(
                request_id=request_id,
                transfer_id=target.transfer_id,
                generation=target.generation,
                first_token_id=token,
            )
            return decode_pb2.StepsRequest(start=sequence)

        with stack.stream("decode.Steps", stack.first_message("decode.Steps")) as steps:
            for wrong, reason in (
                (start(kv_pb2.TransferTarget(transfer_id=999_999)), "there is no transfer"),
                (start(first, "another"), "there is no transfer"),
                (start(first, token=VOCABULARY), "there is no token"),
                (start(first, token=-1), "there is no token"),
            ):
                steps.send(wrong)
                assert reason in steps.read().failed[0].reason
            unknown = decode_pb2.CancelSequence(request_id="same", transfer_id=999_999)
            steps.send(start(first), start(second), decode_pb2.StepsRequest(cancel=unknown))
            received: list[int] = []
            failed: list[str] = []
            outcomes: list[int] = []
            finished = 0
            while not (finished and failed and outcomes):  # the steps may be quicker than the messages
                answer = steps.read()
                failed += [failure.reason for failure in answer.failed]
                outcomes += [cancelled.outcome for cancelled in answer.cancelled]
                for item in answer.tokens:
                    assert item.position == len(received) + 1
                    received += item.token_ids
                    finished = item.finish_reason
            assert len(received) == max_tokens - 1  # the first came from prefill
            assert failed == ["a sequence of this id is running already"]
            assert outcomes == [kv_pb2.CANCEL_OUTCOME_UNKNOWN]
            for transfer_id, generation in ((0, 0), (first.transfer_id, first.generation)):  # it has no secret
                resume = decode_pb2.ResumeSequence(
                    request_id="same", fence=9, transfer_id=transfer_id, generation=generation
                )
                steps.send(decode_pb2.StepsRequest(resume=resume))
                assert "there is no such sequence" in steps.read().failed[0].reason


CANCELS = 5000
"""More than one answer has."""


def test_answers_that_are_not_read(stack: Stack) -> None:
    """Thousands of cancels whose answers are not read do not pile up: the stream is read no further."""
    cancel = decode_pb2.StepsRequest(cancel=decode_pb2.CancelSequence(request_id="r" * 200))
    with stack.stream("decode.Steps", stack.first_message("decode.Steps")) as steps:
        steps.send(*[cancel.SerializeToString()] * CANCELS)
        counted = 0
        while counted < CANCELS:
            answer = steps.read()
            assert len(answer.cancelled) <= 4096
            counted += len(answer.cancelled)
        assert steps.finish().code is CODES.OK


# --- the kvstore -----------------------------------------------------------------------------------------------------


def put_open(stack: Stack, transfer: int = 1, **wrong: Any) -> kvstore_pb2.PutRequest:
    layout = stack.model.layout
    values: dict[str, Any] = {
        "transfer": transfer,
        "keys": bytes([transfer]) * 32,
        "parent_keys": bytes(32),
        "layer_end": layout.layers,
        "head_end": layout.kv_heads,
        "tenant": "raw",
    }
    return kvstore_pb2.PutRequest(open=kvstore_pb2.PutOpen(**(values | wrong)))


BAD_PUTS: list[tuple[str, dict[str, Any]]] = [
    ("keys: length must be a multiple of 32", {"keys": bytes(33)}),
    ("keys: a transfer has 1 to 16384 keys, not 0", {"keys": b"", "parent_keys": b""}),
    ("keys: at most 16384 keys", {"keys": bytes(32 * 20_000)}),
    ("keys: a key occurs twice", {"keys": bytes(64), "parent_keys": bytes(64)}),
    ("parent_keys: length must be a multiple of 32", {"parent_keys": bytes(31)}),
    ("parent_keys: 2 parents for 1 keys", {"parent_keys": bytes(64)}),
    ("tenant: has more than 1024 bytes", {"tenant": "t" * 1025}),
    ("layer_end: ", {"layer_end": 0}),
    ("layer_end: ", {"layer_end": (1 << 32) - 1}),
    ("layer_end: ", {"layer_begin": 3, "layer_end": 2}),
    ("head_end: ", {"head_end": 0}),
    ("head_end: ", {"head_begin": (1 << 32) - 1, "head_end": (1 << 32) - 1}),
    ("keys: the transfer needs", {"keys": b"".join(i.to_bytes(32, "big") for i in range(16384)), "parent_keys": b""}),
]


@pytest.mark.parametrize(("reason", "wrong"), BAD_PUTS, ids=[case[0].strip() for case in BAD_PUTS])
def test_bad_puts(stack: Stack, reason: str, wrong: dict[str, Any]) -> None:
    """A wrong transfer is refused with the field's name; the stream and its other transfers go on."""
    hello = kvstore_pb2.PutRequest(hello=stack.hello())
    with stack.stream("kvstore.Put", hello, put_open(stack, 1, **wrong), put_open(stack, 2)) as stream:
        assert stream.read().HasField("welcome")
        refused = stream.read().refused
        assert refused.transfer == 1
        assert reason in refused.reason
        assert stream.read().opened.transfer == 2
        assert stream.finish().code is CODES.OK


@pytest.mark.parametrize("field", ["kv_heads", "head_dim", "layers"])
def test_layouts_that_no_model_has_are_refused(stack: Stack, field: str) -> None:
    hello = stack.hello()
    setattr(hello.layout, field, (1 << 32) - 1)
    for name, message in (
        ("kvstore.Put", kvstore_pb2.PutRequest(hello=hello)),
        ("kvstore.Get", kvstore_pb2.GetRequest(hello=hello)),
    ):
        outcome = stack.call(name, message)
        assert (outcome.code, outcome.field) == (MISMATCH, f"layout.{field}")


BAD_GETS: list[dict[str, Any]] = [
    {"keys": bytes(31)},
    {"keys": bytes(32 * 20_000)},
    {"layer_end": 0},
    {"layer_end": (1 << 32) - 1},
    {"head_end": 0},
    {"head_end": (1 << 32) - 1},
    {"head_begin": 1, "head_end": 1},
]


@pytest.mark.parametrize("wrong", BAD_GETS)
def test_bad_gets(stack: Stack, wrong: dict[str, Any]) -> None:
    """A read that can never be served is a miss; its stream goes on."""
    layout = stack.model.layout
    values: dict[str, Any] = {
        "transfer": 1,
        "keys": bytes(32),
        "layer_end": layout.layers,
        "head_end": layout.kv_heads,
    }
    read = kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(**(values | wrong)))
    outcome = stack.call("kvstore.Get", kvstore_pb2.GetRequest(hello=stack.hello()), read)
    assert outcome.code is grpc.StatusCode.OK, outcome
    assert [answer.WhichOneof("message") for answer in outcome.answers] == ["welcome", "opened", "done"]
    assert outcome.answers[1].opened.blocks == 0


@pytest.mark.parametrize("keys", [bytes(33), bytes(32 * ((1 << 15) + 1))])
def test_bad_prefix(stack: Stack, keys: bytes) -> None:
    """Keys of odd length, and too many of them."""
    outcome = stack.call("kvstore.MatchPrefix", kvstore_pb2.MatchPrefixRequest(keys=keys))
    assert (outcome.code, outcome.field) == (INVALID, "keys")


# --- joining ---------------------------------------------------------------------------------------------------------


BAD_JOINS: list[tuple[grpc.StatusCode, str, Callable[[Any], Any]]] = [
    (INVALID, "instance.id", lambda hello: hello.instance.ClearField("id")),
    (INVALID, "instance.id", lambda hello: setattr(hello.instance, "id", "a\nb")),
    (INVALID, "instance.kind", lambda hello: hello.instance.ClearField("kind")),
    (INVALID, "instance.kind", lambda hello: setattr(hello.instance, "kind", 99)),
    (INVALID, "instance.address", lambda hello: hello.instance.ClearField("address")),
    (INVALID, "instance.address", lambda hello: setattr(hello.instance, "address", "0.0.0.0:1")),
    (INVALID, "model", lambda hello: hello.ClearField("model")),
    (INVALID, "model.namespace", lambda hello: setattr(hello.model, "namespace", b"short")),
    (INVALID, "model.max_tokens", lambda hello: setattr(hello.model, "max_tokens", 0)),
    (INVALID, "total_blocks", lambda hello: setattr(hello, "total_blocks", 0)),
    (MISMATCH, "model.name", lambda hello: setattr(hello.model, "name", "another")),
    (MISMATCH, "model.config_hash", lambda hello: setattr(hello.model, "config_hash", bytes(32))),
    (MISMATCH, "model.vocab_size", lambda hello: setattr(hello.model, "vocab_size", 1)),
    (MISMATCH, "model.namespace", lambda hello: setattr(hello.model, "namespace", bytes(32))),
    (MISMATCH, "model.layout.block_size", lambda hello: setattr(hello.model.layout, "block_size", 32)),
    (MISMATCH, "layout.dtype", lambda hello: setattr(hello.model.layout, "dtype", "float8")),
    (CODES.UNAVAILABLE, "", lambda hello: setattr(hello.instance, "address", "127.0.0.1:1")),
]


@pytest.mark.parametrize(("code", "field", "change"), BAD_JOINS, ids=[f"{i}-{c[1]}" for i, c in enumerate(BAD_JOINS)])
def test_bad_joins(stack: Stack, code: grpc.StatusCode, field: str, change: Callable[[Any], Any]) -> None:
    """Who does not fit is told why, and is never among the members."""
    hello = stack.join_hello(kv_pb2.INSTANCE_KIND_PREFILL)
    change(hello)
    outcome = stack.call("conductor.Join", conductor_pb2.JoinRequest(hello=hello))
    assert (outcome.code, outcome.field) == (code, field), outcome
    assert {instance.id for instance in stack.client.cluster_state().instances} == set(stack.instances)


@pytest.mark.parametrize("field", ["stored_keys", "removed_keys"])
@pytest.mark.parametrize("keys", [bytes(33), bytes(32 * ((1 << 13) + 1))])
def test_bad_events(stack: Stack, field: str, keys: bytes) -> None:
    """A member whose events make no sense is let go, and with it all that it said it had."""
    index = stack.gauge("conductor", "index_keys")
    hello = conductor_pb2.JoinRequest(hello=stack.join_hello(kv_pb2.INSTANCE_KIND_KVSTORE))
    known = kv_pb2.KVEvents(sequence=1, snapshot_begin=True, snapshot_end=True, stored_keys=bytes(32))
    wrong = kv_pb2.KVEvents(sequence=2)
    setattr(wrong, field, keys)
    outcome = stack.call(
        "conductor.Join", hello, conductor_pb2.JoinRequest(events=known), conductor_pb2.JoinRequest(events=wrong)
    )
    assert (outcome.code, outcome.field) == (INVALID, f"events.{field}"), outcome
    assert stack.gauge("conductor", "index_keys") == index
