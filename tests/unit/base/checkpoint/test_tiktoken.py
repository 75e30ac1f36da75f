"""Folders with tiktoken's vocabulary: ids are those of tiktoken's own rule, written down here plainly."""

import base64
import json
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base import bundled
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.folder_tokenizer import folder_end_tokens
from moonpool.base.checkpoint.tiktoken_vocabulary import KIMI_PATTERN, RESERVED
from moonpool.base.errors import CheckpointError, UnsupportedModel
from tests.examples import examples
from tests.unit.base.checkpoint.folder import write_config

_LEVEL = tokenizers.decoders.ByteLevel()
_BASE = tokenizers.Tokenizer.from_file(str(Path(bundled.__file__).parent / "tiny" / "tokenizer.json"))
_SPLIT = regex.compile(KIMI_PATTERN, regex.V1)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 5: "<|im_user|>", 255: "[PAD]"}


def _spelled() -> dict[str, int]:
    """Each byte by byte-level BPE's character."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    shown = {character: ord(character) for character in characters if ord(character) < 256}
    hidden = sorted(set(range(256)) - set(shown.values()))
    return shown | {chr(256 + at): byte for at, byte in enumerate(hidden)}


def _vocabulary() -> dict[bytes, int]:
    """The bundled model's tokens as bytes, single bytes first, with ids from 0."""
    of = _spelled()
    order = {
        bytes(of[character] for character in token): at
        for token, at in _BASE.get_vocab().items()
        if all(character in of for character in token)
    }
    every = order.keys() | {bytes([byte]) for byte in range(256)}
    words = sorted(every, key=lambda word: (len(word) > 1, order.get(word, 0), word))
    return {word: at for at, word in enumerate(words)}


RANKS = _vocabulary()


def ids_of(text: str) -> list[int]:
    """What tiktoken makes of a text without special tokens."""
    found = []
    for piece in _SPLIT.findall(text):
        raw = piece.encode()
        parts = [raw] if raw in RANKS else [raw[at : at + 1] for at in range(len(raw))]
        while pairs := [
            (RANKS[parts[at] + parts[at + 1]], at) for at in range(len(parts) - 1) if parts[at] + parts[at + 1] in RANKS
        ]:
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [RANKS[part] for part in parts]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Kimi K2 is published: no tokenizer.json, a class of its own, few of the special tokens named."""
    folder = write_config(tmp_path_factory.mktemp("kimi"), vocab_size=len(RANKS) + RESERVED)
    lines = (b"%s %d" % (base64.b64encode(word), rank) for word, rank in RANKS.items())
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(RANKS) + at): {"content": text, "special": True} for at, text in NAMED.items()}
    settings_ = {
        "added_tokens_decoder": added,
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x",
        "HTTPServer it's IT'S o'clock",
        "汉字 mixed汉字with 12345 digits",
        "  \n\n\t a",
        "naïve é́🎉",
        "",
    ],
)
def test_ids_of_texts(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text) == ids_of(text)
    assert tokenizer.decode(ids_of(text)) == text


@given(text=st.text(st.one_of(st.characters(), st.sampled_from("ab AB'st1 \n漢é")), max_size=60))
@settings(max_examples=examples(60), deadline=None)
def test_ids_of_any_text(text: str, tokenizer: Tokenizer) -> None:
    if "<|" in text or "[" in text:  # which may begin a special token
        return
    assert tokenizer.encode(text) == ids_of(text)


def test_special_tokens_have_the_ids_behind_the_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    first = len(RANKS)
    assert tokenizer.vocab_size == first + RESERVED
    assert tokenizer.encode(f"[BOS]a<|reserved_token_{first + 3}|>[PAD]") == [
        first,
        RANKS[b"a"],
        first + 3,
        first + 255,
    ]
    chat = tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": "a"}]))
    assert chat == [first + 5, RANKS[b"a"], first + 2]
    assert set(folder_end_tokens(folder)) == {first + 1, first + 2}


@pytest.mark.parametrize("damage", [b"not base64! 0\n", b"YQ==\n", b"YQ== 1\nYg== 2\n", b"YQ== x\n"])
def test_a_damaged_vocabulary_is_named(damage: bytes, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(damage)
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        Tokenizer.load(tmp_path)


def test_a_class_with_another_pattern_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}')
    with pytest.raises(UnsupportedModel, match="tokenizer_class"):
        Tokenizer.load(tmp_path)
