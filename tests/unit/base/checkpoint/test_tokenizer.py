"""Tokenizer, chat template, incremental detokenising and stop strings, on the bundled tokenizer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from moonpool.base import bundled
from moonpool.base.checkpoint import ChatOptions, StopWatcher, Tokenizer
from moonpool.base.errors import CheckpointError, InvalidRequest
from tests.examples import examples
from tests.unit.engine.models.quirks import sentencepiece

TINY = Path(bundled.__file__).parent / "tiny"
TOKENIZER = Tokenizer.load(TINY)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie geht's?\nZwei Zeilen."},
    {"role": "assistant", "content": "Gut, 好 🎉"},
    {"role": "user", "content": "<b>&</b>"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    return tmp_path


def settings_of(folder: Path, **changed: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_encode_and_decode() -> None:
    plain = TOKENIZER.encode("def f(x):", add_special=False)
    assert TOKENIZER.encode("def f(x):") == [0, *plain]
    assert TOKENIZER.decode([0, *plain, 1]) == "def f(x):"
    assert TOKENIZER.decode([0, *plain], skip_special=False) == "<s>def f(x):"
    assert TOKENIZER.vocab_size == 4096


class CountingBackend:
    """The bundled tokenizer's backend, counting the characters that it encodes."""

    def __init__(self) -> None:
        self.backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
        self.chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.chars += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **options)


def test_special_tokens_can_be_kept() -> None:
    """Where they mark something, as calls of functions."""
    kept, left = TOKENIZER.stream(skip_special=False), TOKENIZER.stream()
    tokens = [*TOKENIZER.encode("a", add_special=False), 0, *TOKENIZER.encode("b", add_special=False)]
    assert "".join(kept.push([token]) for token in tokens) == "a<s>b"
    assert "".join(left.push([token]) for token in tokens) == "ab"


def test_a_text_that_is_far_too_long_is_not_tokenised_to_its_end() -> None:
    backend: Any = CountingBackend()
    tokenizer = Tokenizer(backend)
    assert tokenizer.is_longer("x = foo(y)\n" * 400_000, 1000)
    assert backend.chars <= 20_000
    backend.chars = 0
    assert not tokenizer.is_longer("x" * 1000, 1000)
    assert backend.chars == 0, "a token has a byte at least"
    assert tokenizer.is_longer("é" * 12_000, 1000)
    assert backend.chars == 0, "no token has 24 bytes"


@settings(max_examples=examples(30))
@given(st.text(max_size=40), st.integers(1, 3000), st.integers(0, 40))
def test_only_texts_that_are_too_long_are_called_so(text: str, repeats: int, spare: int) -> None:
    whole = text * repeats
    assert not TOKENIZER.is_longer(whole, len(TOKENIZER.encode(whole)) + spare)


def test_chat_equals_transformers() -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)
        assert TOKENIZER.render_chat(MESSAGES, options=ChatOptions(prompt)).text == expected
        ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False)
        assert TOKENIZER.apply_chat_template(MESSAGES, options=ChatOptions(prompt)) == ids


def test_where_the_template_is(folder: Path) -> None:
    settings_of(
        folder, bos_token={"content": "<s>"}, chat_template=[{"name": "default", "template": "A{{ bos_token }}"}]
    )
    assert Tokenizer.load(folder).render_chat([]).text == "A<s>"
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert Tokenizer.load(folder).render_chat([{"role": "user", "content": "é<"}]).text == (
        '[{"role": "user", "content": "é<"}]'
    )
    (folder / "chat_template.jinja").write_text("a{% generation %}b{% endgeneration %}")
    assert Tokenizer.load(folder).render_chat([]).text == "ab"
    settings_of(folder, chat_template=None)
    (folder / "chat_template.jinja").unlink()
    without = Tokenizer.load(folder)
    assert not without.chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        without.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ namespace.__init__.__globals__['os'].system('true') }}",
    ],
)
def test_a_template_can_refuse_but_do_nothing(template: str, folder: Path) -> None:
    settings_of(folder, chat_template=template)
    with pytest.raises(InvalidRequest, match="messages"):
        Tokenizer.load(folder).render_chat([{"role": "user", "content": "x"}])


def test_messages_must_be_plain_data() -> None:
    with pytest.raises(InvalidRequest, match="plain JSON data"):
        TOKENIZER.render_chat([{"role": "user", "content": object()}])


def test_bad_folders(folder: Path) -> None:
    settings_of(folder, chat_template="{% if %}")
    with pytest.raises(CheckpointError, match="chat template"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(folder)


def cut(ids: list[int], seed: int) -> list[list[int]]:
    """Cut into pieces of 0 to 3 tokens."""
    rng, parts, begin = random.Random(seed), [], 0
    while begin < len(ids):
        size = rng.randrange(4)
        parts.append(ids[begin : begin + size])
        begin += size
    return parts


@settings(max_examples=examples(60))
@given(st.text(max_size=30), st.integers(0, 9))
def test_pieces_make_the_whole_text(text: str, seed: int) -> None:
    ids = TOKENIZER.encode(text)
    stream = TOKENIZER.stream()
    pieces = [stream.push(part) for part in cut(ids, seed)]
    assert "".join(pieces) + stream.flush() == TOKENIZER.decode(ids) == text


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 4095), max_size=30), st.integers(0, 9))
def test_any_tokens_make_their_text(ids: list[int], seed: int) -> None:
    stream = TOKENIZER.stream()
    pieces = [stream.push(part) for part in cut(ids, seed)]
    assert "".join(pieces) + stream.flush() == TOKENIZER.decode(ids)


def test_half_characters_are_held_back() -> None:
    ids = TOKENIZER.encode("🎉x", add_special=False)
    stream = TOKENIZER.stream()
    pieces = [stream.push([token]) for token in ids]
    assert [piece for piece in pieces if piece] == ["🎉", "x"]
    cut_off = TOKENIZER.stream()
    assert cut_off.push(ids[:2]) == ""
    assert cut_off.flush() == "\ufffd"
    assert cut_off.flush() == ""
    continued = TOKENIZER.stream(ids[:2])
    assert continued.push(ids[2:]) == "🎉x"


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_what_a_prompt_leaves_broken_is_not_in_the_answer(broken: int) -> None:
    """Whether the answer begins another character, breaks one itself, or has no token at all."""
    party = TOKENIZER.encode("🎉", add_special=False)
    assert len(party) == 4, "a token for each byte"
    prompt, brace = [*TOKENIZER.encode("so"), *party[:broken]], TOKENIZER.encode("{", add_special=False)
    assert TOKENIZER.stream(prompt).push(brace) == "{"
    assert TOKENIZER.stream(prompt).flush() == ""
    apart = TOKENIZER.stream(prompt)
    assert [apart.push(brace), apart.push(party[:1]), apart.flush()] == ["{", "", "\ufffd"]
    replaced = TOKENIZER.stream(TOKENIZER.encode("so\ufffd"))
    assert [replaced.push(brace), replaced.flush()] == ["{", ""]


def test_invalid_bytes_are_not_held_for_ever() -> None:
    lead = TOKENIZER.encode("🎉", add_special=False)[0]
    stream = TOKENIZER.stream()
    shown = "".join(stream.push([lead]) for _ in range(100))
    assert len(shown) >= 64
    assert shown + stream.flush() == TOKENIZER.decode([lead] * 100)


def test_a_prompt_gives_context_and_no_text() -> None:
    """With a decoder that strips the first space of a text, a continuation keeps its own."""
    backend = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1]) == "a b"
    assert tokenizer.stream().push([1]) == "b"
    stream = tokenizer.stream([0])
    assert [stream.push([1]), stream.push([0, 1]), stream.flush()] == [" b", " a b", ""]


def test_stop_strings() -> None:
    watcher = StopWatcher(["END", "EN route"])
    assert [watcher.push(piece) for piece in ["a E", "N", " r", "x E", "ND more"]] == ["a ", "", "", "EN rx ", ""]
    assert watcher.matched == "END"
    assert watcher.push("more") == ""
    assert watcher.flush() == ""


def test_text_held_back_is_flushed() -> None:
    watcher = StopWatcher(["\n\n"])
    assert watcher.push("a\n") == "a"
    assert watcher.flush() == "\n"
    assert not watcher.stopped
    assert StopWatcher(["", ""]).push("a") == "a"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 9))
def test_stops_do_not_depend_on_the_cuts(text: str, stops: list[str], seed: int) -> None:
    whole, cut_up = StopWatcher(stops), StopWatcher(stops)
    expected = whole.push(text) + whole.flush()
    pieces = ["".join(chr(c) for c in part) for part in cut([ord(c) for c in text], seed)]
    assert "".join(map(cut_up.push, pieces)) + cut_up.flush() == expected
    assert cut_up.matched == whole.matched
    assert not any(stop in expected for stop in stops)


WORDS = ["a", " b", "</s>", "<s>", "<pad>", "\n", "é", "< /s>", "the thing"]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "prepend", "unigram"])
def test_texts_of_a_conversation_never_become_control_tokens(kind: str, folder: Path) -> None:
    """The prompt has the control tokens of its template, and says what the conversation says."""
    if kind != "bytes":
        sentencepiece(kind)(folder)
    tokenizer = Tokenizer.load(folder)
    controls = {
        token for token in range(3) if tokenizer.special_id(tokenizer.decode([token], skip_special=False)) == token
    }
    draw = random.Random(13)
    for _ in range(200):
        text = "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 9)))
        roles = ("user", "assistant", "user")[: draw.choice((1, 3))]
        messages, plain = ([{"role": role, "content": said} for role in roles] for said in (text, "x"))
        ids = tokenizer.apply_chat_template(messages)
        counts = [[found.count(token) for token in controls] for found in (ids, tokenizer.apply_chat_template(plain))]
        assert counts[0] == counts[1], text
        if kind == "bytes":
            assert tokenizer.decode(ids, skip_special=False) == tokenizer.render_chat(messages).text


def test_special_tokens_go_around_a_marked_chat(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    chat = tokenizer.render_chat([{"role": "user", "content": "a</s>b"}])
    assert tokenizer.encode_chat(chat, add_special=True) == [0, *tokenizer.encode_chat(chat)]


def test_a_template_from_a_file(folder: Path) -> None:
    (folder / "mine.jinja").write_text("mine {{ messages[0].content }}")
    tokenizer = Tokenizer.load(folder, folder / "mine.jinja")
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]).text == "mine x"
    with pytest.raises(CheckpointError, match="cannot read"):
        Tokenizer.load(folder, folder / "missing.jinja")


@pytest.mark.parametrize("seed", range(4))
def test_text_does_not_depend_on_how_tokens_are_cut_into_calls(seed: int) -> None:
    """Broken characters among the tokens too: bytes alone, in runs longer than what is held back."""
    generator = random.Random(seed)
    whole = TOKENIZER.encode("the tide 🌊 turns — höher", add_special=False)
    broken = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.decode([token]) == "\ufffd"]
    ids = [*whole, *generator.choices(broken, k=40), *whole, *generator.choices([*whole, *broken], k=60), *whole]
    singly, cut = TOKENIZER.stream(whole), TOKENIZER.stream(whole)
    expected = "".join([singly.push([token]) for token in ids]) + singly.flush()
    text, at = "", 0
    while at < len(ids):
        size = generator.randrange(1, 20)
        text += cut.push(ids[at : at + size])
        at += size
    assert text + cut.flush() == expected, f"seed {seed}"
