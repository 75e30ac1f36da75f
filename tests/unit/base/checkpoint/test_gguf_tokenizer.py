"""Tokenizers of GGUF files beyond what small checkpoints have: SentencePiece, digits, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from gguf import TokenType
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.peers.gguf_files import VALUE_TYPES
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.errors import CheckpointError, UnsupportedModel

SPACE = "\u2581"
WORDS = ["th", "he", "the", f"{SPACE}the", f"{SPACE}t", "in", "ing", "thing", f"{SPACE}s", "so", "me", "some", SPACE]
TEXTS = ("the things  in some\nthing", " the", "  two", "é 漢 🎉", "<s>tell</s> me <tool>so", "")


def write_sentencepiece(file: Path, **more: Any) -> Path:
    """A vocabulary of bytes, letters and some words, longer ones first."""
    words = [*dict.fromkeys(WORDS), *"abcdefghilmnorstuwy"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tool>"]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [*[TokenType.NORMAL] * len(words), TokenType.USER_DEFINED]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in more.items():
        writer.add_key_value(f"tokenizer.{key.replace('__', '.')}", value, VALUE_TYPES[type(value)])
    return finished(writer, file)


def write_bytes(file: Path, pre: str, merges: list[str], model: str = "gpt2") -> Path:
    """A byte-level vocabulary of bytes and merges."""
    letters = sorted(ByteLevel.alphabet())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*letters, *(merge.replace(" ", "") for merge in merges)])
    writer.add_token_merges(merges)
    return finished(writer, file)


def finished(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_sentencepiece_is_that_of_transformers(tmp_path: Path) -> None:
    ours = Tokenizer.load(write_sentencepiece(tmp_path / "model.gguf"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]
    assert ours.encode("the")[0] == 1


def test_flags_of_the_file_decide_what_is_put_around(tmp_path: Path) -> None:
    more = {"ggml__add_bos_token": False, "ggml__add_eos_token": True, "ggml__add_space_prefix": False}
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "model.gguf", **more))
    assert tokenizer.encode("the") == [tokenizer.encode("the", add_special=False)[0], 2]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert not tokenizer.chat_template


def test_spaces_are_letters_of_gemma_4(tmp_path: Path) -> None:
    """Merges decide, across words too; nothing is put in front; letters without a token are bytes."""
    words = [SPACE, "a", "b", "c", "ab", f"{SPACE}{SPACE}", f"{SPACE}ab", "\n", "\n\n"]
    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tool>"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(words)]
    writer.add_token_types([*kinds, TokenType.USER_DEFINED])
    writer.add_token_merges(["a b", f"{SPACE} {SPACE}", f"{SPACE} ab", "\n \n"])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
    tokenizer = Tokenizer.load(finished(writer, tmp_path / "model.gguf"))
    text = "ab ab   c\n\né<tool>"
    ids = tokenizer.encode(text)
    pieces = ["<bos>", "ab", f"{SPACE}ab", SPACE * 2, SPACE, "c", "\n\n", "<0xC3>", "<0xA9>", "<tool>"]
    assert [tokens[token] for token in ids] == pieces
    assert tokenizer.decode(ids[1:]) == text


def test_digits_stand_alone_where_the_model_was_trained_so(tmp_path: Path) -> None:
    """SmolLM2's way, which transformers does not know: merges across digits are not made, spaces before them stay."""
    merges = ["1 2", "Ġ Ġ"]
    plain = Tokenizer.load(write_bytes(tmp_path / "plain.gguf", "gpt-2", merges))
    digits = Tokenizer.load(write_bytes(tmp_path / "digits.gguf", "smollm", merges))
    text = "a  12"
    assert [plain.decode([token]) for token in plain.encode(text)] == ["a", " ", " ", "12"]
    assert [digits.decode([token]) for token in digits.encode(text)] == ["a", "  ", "1", "2"]


SPLIT = "it'S 12345 aBc q\u0301漢x.y!\n"
DIGITS = (" ", *"12345")
THREES = (" ", "123", "45")
PIECES = {
    ("gpt-2", "olmo", "exaone4"): ("it", "'", "S", " 12345", " aBc", " q", "\u0301", "漢x", ".", "y", "!", "\n"),
    ("falcon",): ("it", "'", "S", *THREES, " aBc", " q", "\u0301", "漢x", ".", "y", "!", "\n"),
    ("llama-bpe", "lfm2", "glm4"): ("it", "'S", *THREES, " aBc", " q", "\u0301漢x", ".y", "!\n"),
    ("bailingmoe2", "qwen2", "stablelm2", "hunyuan"): ("it", "'S", *DIGITS, " aBc", " q", "\u0301漢x", ".y", "!\n"),
    ("seed-coder",): ("it", "'S", *DIGITS, " aBc", " q", "\u0301漢x", ".y", "!", "\n"),
    ("qwen35",): ("it", "'S", *DIGITS, " aBc", " q\u0301漢x", ".y", "!\n"),
    ("deepseek-v3", "hunyuan-dense"): ("it", "'S", *THREES, " aBc", " q\u0301", "漢", "x", ".y", "!\n"),
    ("gpt-4o", "llama4", "minimax-m2"): ("it'S", *THREES, " a", "Bc", " q\u0301漢x", ".y", "!\n"),
    ("kimi-k2",): ("it'S", *THREES, " a", "Bc", " q\u0301", "漢", "x", ".y", "!\n"),
    ("tekken",): ("it", "'S", *DIGITS, " a", "Bc", " q\u0301漢x", ".y", "!\n"),
}
"""Where texts are cut before merging, by name."""


@pytest.mark.parametrize(("name", "pieces"), [(name, pieces) for names, pieces in PIECES.items() for name in names])
def test_texts_are_cut_as_in_training(name: str, pieces: tuple[str, ...], tmp_path: Path) -> None:
    """All merges within the text are known, so that every piece becomes one token."""
    ((spelled, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(SPLIT)
    ends = [(begin, begin + width) for width in range(2, len(spelled) + 1) for begin in range(len(spelled) - width + 1)]
    merges = [f"{spelled[begin:at]} {spelled[at:end]}" for begin, end in ends for at in range(begin + 1, end)]
    tokenizer = Tokenizer.load(write_bytes(tmp_path / "model.gguf", name, list(dict.fromkeys(merges))))
    assert tuple(tokenizer.decode([token]) for token in tokenizer.encode(SPLIT)) == pieces


def test_unknown_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre: 'viking' is none of"):
        Tokenizer.load(write_bytes(tmp_path / "a.gguf", "viking", ["a b"]))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model: 'rwkv' is none of gpt2, llama, gemma4"):
        Tokenizer.load(write_bytes(tmp_path / "b.gguf", "gpt-2", ["a b"], model="rwkv"))
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer.load(write_bytes(tmp_path / "c.gguf", "gpt-2", ["Q x y"]))
    with pytest.raises(CheckpointError, match="chat template"):
        Tokenizer.load(write_sentencepiece(tmp_path / "d.gguf", chat_template="{% if %}"))


def test_named_templates(tmp_path: Path) -> None:
    """A further template has its name behind the key; the one for tools is used with tools."""
    more = {"chat_template": "D{{ tools }}", "chat_template__tool_use": "U{{ tools | length }}"}
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "model.gguf", **more))
    turns = [{"role": "user", "content": "x"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.render_chat(turns).text == "DNone"
    assert tokenizer.render_chat(turns, [tool]).text == "U1"
