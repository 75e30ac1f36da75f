"""Prompts with pictures at the conductor: tokens, places and digests; what is refused, and in which words."""

from dataclasses import replace

import pytest

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.checkpoint.config import AnswerRules
from moonpool.base.kv.keys import block_keys, tokens_from_bytes, unpack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.pictures.limits import MAX_BYTES, MAX_PICTURES, MAX_PIXELS
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import GenerateArguments, InvalidRequest, Message, MessagePart, Picture
from moonpool.client.translate import generate_request
from moonpool.conductor.checkpoint import Checkpoint
from moonpool.conductor.context_records import check_create
from moonpool.conductor.request_validator import read_request
from moonpool.conductor.valid_request import ServedModel, ValidRequest
from moonpool.v1 import conductor_pb2
from tests.pictures import ROWS, picture_model

BLOCK = 16
CAT = Picture(b"cat", 128, 96)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.load(str(picture_model(tmp_path_factory.mktemp("model") / "tiny-smolvlm")))


@pytest.fixture
def served(checkpoint: Checkpoint) -> ServedModel:
    layout = KVLayout.uniform(layers=2, kv_heads=2, head_dim=16, block_size=BLOCK, dtype="float32")
    return ServedModel(
        checkpoint.name, checkpoint.config, checkpoint.tokenizer, bytes(32), layout, 2048, 1.0, {}, AnswerRules(), {},
        pictures=checkpoint.pictures,
    )  # fmt: skip


def turn(*parts: str | Picture) -> Message:
    found: list[MessagePart] = [{"text": part} if isinstance(part, str) else {"picture": part} for part in parts]
    return {"role": "user", "content": "", "parts": found}


def read(served: ServedModel, *messages: Message, **given: object) -> ValidRequest:
    arguments: GenerateArguments = {"messages": messages, **given}  # type: ignore[typeddict-item]
    return read_request(generate_request(arguments), served, "r", 0.0, 60.0, lambda: 1)


def test_a_picture_becomes_tokens_with_a_place_and_a_digest(served: ServedModel) -> None:
    request = read(served, turn("Look: ", CAT, "What is it?"))
    (item,) = request.media
    assert not isinstance(served.pictures, str)
    assert request.prompt[item.begin : item.end].tolist() == list(served.pictures.tokens((3, 4)))
    assert sum(token == served.pictures.mark for token in request.prompt) == ROWS * 13
    text = served.tokenizer.decode(request.prompt[: item.begin], skip_special=False)
    assert text == "<|im_start|>User: Look:" or text == "<|im_start|>User: Look: "
    assert (item.content, item.width, item.height) == (b"cat", 128, 96)


def test_what_engines_get_has_the_pictures_and_their_keys(served: ServedModel) -> None:
    request = read(served, turn("Look: ", CAT, "What is it?"))
    spec = request.sequence("r", request.prompt[:0], request.keys_with(request.prompt[:0]))
    (item,) = spec.media
    assert (item.content, item.digest) == (b"cat", request.media[0].digest)
    tokens = tokens_from_bytes(spec.token_ids)
    assert unpack_keys(spec.block_keys) == block_keys(request.chain_root, tokens, BLOCK, request.media)
    dog = read(served, turn("Look: ", replace(CAT, content=b"dog"), "What is it?"))
    assert dog.prompt == request.prompt
    first = request.media[0].begin // BLOCK
    assert dog.prompt_keys[:first] == request.prompt_keys[:first]
    assert not set(dog.prompt_keys[first:]) & set(request.prompt_keys)
    assert dog.spec.prompt_key != request.spec.prompt_key
    longer = request.prompt + request.prompt[:40]
    assert request.keys_with(request.prompt[:40]) == block_keys(request.chain_root, longer, BLOCK, request.media)


def test_a_picture_is_its_bytes_whatever_it_is_called(served: ServedModel) -> None:
    """Peers have made keys of URLs, behind which pictures change."""
    place = "https://images.example.com/today.png"
    seen = [replace(CAT, content=content, place=place) for content in (b"one", b"two", b"one")]
    keys = [read(served, turn("Look: ", each, "What is it?")).prompt_keys for each in seen]
    assert keys[0] == keys[2]
    assert not set(keys[0][1:]) & set(keys[1][1:])
    elsewhere = read(served, turn("Look: ", replace(seen[0], place="messages.0"), "What is it?"))
    assert elsewhere.prompt_keys == keys[0]


def test_the_same_picture_behind_another_text_is_computed_anew(served: ServedModel) -> None:
    first, other = (read(served, turn(text, CAT, "What is it?")) for text in ("Look: ", "Loop: "))
    assert first.media[0].digest == other.media[0].digest
    assert not set(first.prompt_keys) & set(other.prompt_keys)


def test_a_text_is_never_a_picture(served: ServedModel) -> None:
    marks = "<image> <fake_token_around_image><global-img>"
    assert not isinstance(served.pictures, str)
    plain = read(served, {"role": "user", "content": marks})
    assert (plain.media, served.pictures.mark in plain.prompt) == ((), False)
    seen = read(served, turn(marks, CAT))
    (item,) = seen.media
    assert served.pictures.mark not in seen.prompt[: item.begin]


def test_a_template_of_parts_shows_texts_too(checkpoint: Checkpoint) -> None:
    chat = checkpoint.tokenizer.render_chat([{"role": "user", "content": "hello"}], (), ChatOptions())
    assert chat.text == "<|im_start|>User: hello<end_of_utterance>\nAssistant:"


WRONG: dict[str, tuple[list[Picture], str]] = {
    "many": ([CAT] * (MAX_PICTURES + 1), f"at most {MAX_PICTURES}"),
    "no file": ([replace(CAT, content=b"")], "has 0 bytes"),
    "a large file": ([replace(CAT, content=bytes(MAX_BYTES + 1))], "bytes, 1 to"),
    "large together": ([replace(CAT, content=bytes(MAX_BYTES))] * 2, "together"),
    "no size": ([replace(CAT, width=0)], "0 x 96 pixels"),
    "many pixels": ([replace(CAT, width=MAX_PIXELS)], "pixels, 1 to"),
    "unknown detail": ([replace(CAT, detail="sharp")], "detail must be one of"),
}


@pytest.mark.parametrize("what", WRONG)
def test_limits_have_words_of_their_own(served: ServedModel, what: str) -> None:
    pictures, why = WRONG[what]
    message = conductor_pb2.GenerateRequest(chat=conductor_pb2.ChatPrompt())
    sent = message.chat.messages.add(role="user")
    for given in pictures:
        size = {"width": given.width, "height": given.height}
        sent.parts.add().picture.MergeFrom(conductor_pb2.Picture(content=given.content, detail=given.detail, **size))
    with pytest.raises(InvalidRequest, match=why) as error:
        read_request(message, served, "r", 0.0, 60.0, lambda: 1)
    assert error.value.field == "messages"


def test_models_without_an_encoder_say_so(served: ServedModel) -> None:
    blind = replace(served, pictures="the checkpoint has no encoder of pictures")
    with pytest.raises(InvalidRequest, match="tiny-smolvlm takes no pictures: the checkpoint has no encoder"):
        read(blind, turn(CAT))


@pytest.mark.parametrize("given", [{"prompt_logprobs": 0}, {"embedding": True, "max_tokens": 1}])
def test_scores_of_prompts_with_pictures_are_refused(served: ServedModel, given: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="not built for prompts with pictures"):
        read(served, turn(CAT), sampling=SamplingParams(**given))  # type: ignore[arg-type]


def test_contexts_take_no_pictures() -> None:
    chat = generate_request({"messages": [turn(CAT)]}).chat
    with pytest.raises(InvalidRequest, match="contexts take no pictures"):
        check_create(conductor_pb2.CreateContextRequest(chat=chat))


def test_a_message_has_content_or_parts(served: ServedModel) -> None:
    message = generate_request({"messages": [turn("x", CAT)]})
    message.chat.messages[0].content = "y"
    with pytest.raises(InvalidRequest, match="either content or parts"):
        read_request(message, served, "r", 0.0, 60.0, lambda: 1)
