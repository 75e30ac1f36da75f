import tracemalloc
from array import array
from collections.abc import Callable

import pytest

from moonpool.base.cluster.proto_conversion import media_to_proto
from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import block_keys, chain_root, pack_keys, tokens_to_bytes
from moonpool.base.kv.media import MediaItem
from moonpool.engine.request import IncomingRequest
from moonpool.v1 import kv_pb2

NAMESPACE = bytes(range(32))
BLOCK, VOCABULARY, LENGTH = 16, 100, 64
TOKENS = array("i", range(40))
ROOT = chain_root(NAMESPACE, "me")
KEYS = block_keys(ROOT, TOKENS, BLOCK)


def spec() -> kv_pb2.SequenceSpec:
    return kv_pb2.SequenceSpec(
        request_id="r",
        token_ids=tokens_to_bytes(TOKENS),
        prompt_tokens=30,
        block_keys=pack_keys(KEYS),
        chain_root=ROOT,
        tenant="me",
        end_token_ids=[1],
    )


def unpacked(message: kv_pb2.SequenceSpec) -> IncomingRequest:
    return IncomingRequest.from_proto(
        message, namespace=NAMESPACE, block_size=BLOCK, vocab_size=VOCABULARY, max_tokens=LENGTH
    )


def test_unpacks() -> None:
    request = unpacked(spec())
    assert (request.request_id, request.token_ids, request.spec.tenant) == ("r", TOKENS, "me")
    assert (list(request.spec.keys), request.chain_root) == (KEYS, ROOT)
    assert request.parents() == [ROOT, KEYS[0]]
    assert (request.sampling.prompt_tokens, request.sampling.end_token_ids) == (30, frozenset({1}))
    most = spec()
    most.bad_tokens.extend([kv_pb2.TokenRun(token_ids=[2, 3])] * (VOCABULARY - 2))
    assert unpacked(most).sampling.bad_tokens == ((2, 3),) * (VOCABULARY - 2)


FORMAT_AND_BANS = kv_pb2.SequenceSpec(
    sampling=kv_pb2.Sampling(response_format="json_object"), bad_tokens=[kv_pb2.TokenRun(token_ids=[2])]
)

WRONG: list[tuple[str, Callable[[kv_pb2.SequenceSpec], object]]] = [
    ("request_id", lambda s: s.ClearField("request_id")),
    ("tenant", lambda s: setattr(s, "tenant", "t" * 257)),
    ("token_ids", lambda s: setattr(s, "token_ids", b"123")),
    ("token_ids", lambda s: setattr(s, "token_ids", tokens_to_bytes([1] * (LENGTH + 1)))),
    ("token_ids", lambda s: setattr(s, "token_ids", b"")),
    ("token_ids", lambda s: setattr(s, "token_ids", tokens_to_bytes([-1]))),
    ("token_ids", lambda s: setattr(s, "token_ids", tokens_to_bytes([VOCABULARY]))),
    ("prompt_tokens", lambda s: setattr(s, "prompt_tokens", 41)),
    ("chain_root", lambda s: setattr(s, "tenant", "somebody")),
    ("chain_root", lambda s: setattr(s, "cache_salt", "salt")),
    ("cache_salt", lambda s: setattr(s, "cache_salt", "s" * 257)),
    ("chain_root", lambda s: setattr(s, "chain_root", bytes(32))),
    ("block_keys", lambda s: setattr(s, "block_keys", pack_keys(KEYS[:1]))),
    ("block_keys", lambda s: setattr(s, "block_keys", pack_keys(KEYS[::-1]))),
    ("block_keys", lambda s: setattr(s, "token_ids", tokens_to_bytes(TOKENS[::-1]))),
    ("end_token_ids", lambda s: s.end_token_ids.append(VOCABULARY)),
    ("end_token_ids", lambda s: s.end_token_ids.extend([1] * VOCABULARY)),
    ("sampling.max_tokens", lambda s: setattr(s.sampling, "max_tokens", 0)),
    ("sampling.logprobs", lambda s: setattr(s.sampling, "logprobs", 21)),
    ("sampling.response_format", lambda s: setattr(s.sampling, "response_format", "xml")),
    ("bad_tokens", lambda s: s.bad_tokens.add()),
    ("bad_tokens", lambda s: s.bad_tokens.add(token_ids=[VOCABULARY])),
    ("bad_tokens", lambda s: s.bad_tokens.add(token_ids=[1] * 300)),
    ("bad_tokens", lambda s: s.MergeFrom(FORMAT_AND_BANS)),
    ("bad_tokens", lambda s: s.bad_tokens.extend([kv_pb2.TokenRun(token_ids=[2])] * (VOCABULARY - 1))),
]


@pytest.mark.parametrize(("field", "change"), WRONG, ids=[f"{i}-{case[0]}" for i, case in enumerate(WRONG)])
def test_names_what_is_wrong(field: str, change: Callable[[kv_pb2.SequenceSpec], object]) -> None:
    message = spec()
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        unpacked(message)
    assert caught.value.field == f"sequence.{field}"


HUGE = 1 << 20
HOSTILE: list[tuple[str, Callable[[kv_pb2.SequenceSpec], object]]] = [
    ("token_ids", lambda s: setattr(s, "token_ids", bytes(4 * HUGE))),
    ("end_token_ids", lambda s: s.end_token_ids.extend(range(HUGE))),
    ("bad_tokens", lambda s: s.bad_tokens.extend([kv_pb2.TokenRun()] * HUGE)),
    ("sampling.bad_words", lambda s: s.sampling.bad_words.extend([""] * HUGE)),
    ("sampling.grammar", lambda s: s.sampling.MergeFrom(kv_pb2.Sampling(response_format="regex", grammar="a" * HUGE))),
    ("sampling.stop", lambda s: s.sampling.stop.extend([""] * HUGE)),
    ("sampling.stop_token_ids", lambda s: s.sampling.stop_token_ids.extend(range(HUGE))),
    ("sampling.logit_bias", lambda s: s.sampling.logit_bias.update(dict.fromkeys(range(HUGE // 8), 1.0))),
]


@pytest.mark.parametrize(("field", "change"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_hostile_sizes_are_refused_before_anything_is_unpacked(
    field: str, change: Callable[[kv_pb2.SequenceSpec], object]
) -> None:
    message = spec()
    change(message)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            unpacked(message)
        assert tracemalloc.get_traced_memory()[1] < 5 * HUGE
    finally:
        tracemalloc.stop()
    assert caught.value.field == f"sequence.{field}"


def test_pictures_are_parts_of_keys_and_refused_where_nobody_computes_them() -> None:
    media = [MediaItem(3, 20, bytes(range(32)), b"file")]
    message = spec()
    message.media.extend(media_to_proto(media))
    with pytest.raises(InvalidRequest, match="takes no pictures") as error:
        unpacked(message)
    assert error.value.field == "sequence.media"

    def taken() -> IncomingRequest:
        return IncomingRequest.from_proto(
            message, namespace=NAMESPACE, block_size=BLOCK, vocab_size=VOCABULARY, max_tokens=LENGTH, takes_media=True
        )

    with pytest.raises(InvalidRequest, match="not the 2 keys"):
        taken()
    message.block_keys = pack_keys(block_keys(ROOT, TOKENS, BLOCK, media))
    request = taken()
    assert (list(request.media), request.media[0].content) == (media, b"file")
    assert request.history().media == request.media
    assert request.sampling.media == ((3, 20),)
    message.media[0].end = 31
    with pytest.raises(InvalidRequest, match="no place"):
        taken()
