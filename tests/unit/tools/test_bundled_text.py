"""The bundled model's texts: what is taken, what is held out, and how it becomes tokens."""

import itertools
import random
import sysconfig
from pathlib import Path

import jinja2
import pytest
import torch

from tests.unit.tools.bundled_instances import SOURCE, small_tokenizer
from tools.bundled_model.chat import CHAT_TEMPLATE, chat_header, conversations
from tools.bundled_model.config import BOS, BOS_ID, EOS, EOS_ID, PAD_ID
from tools.bundled_model.corpus import Corpus
from tools.bundled_model.text import (
    Document,
    choose_documents,
    collect_documents,
    is_held_out,
    is_readable,
    split_documents,
)
from tools.bundled_model.tokenizer import encode_conversation, encode_document, encode_text, token_bytes

TOKENIZER = small_tokenizer()


def test_split_depends_on_names_alone() -> None:
    documents = [Document(f"package/module_{i:04}.py", "é") for i in range(2000)]
    split = split_documents(documents, 5.0)
    assert 60 <= len(split.held_out) <= 140
    assert sorted([*split.training, *split.held_out], key=lambda document: document.name) == documents
    assert (split.training_bytes, split.held_out_bytes) == (2 * len(split.training), 2 * len(split.held_out))
    assert all(is_held_out(document.name, 10.0) for document in split.held_out)


def test_the_split_has_not_moved() -> None:
    """Other held-out files would make figures of two versions incomparable."""
    names = [name for name in ("abc.py", "ast.py", "copy.py", "enum.py", "io.py", "re.py") if is_held_out(name, 50.0)]
    assert names == ["copy.py", "enum.py", "io.py"]


def test_data_tables_are_not_text() -> None:
    assert is_readable(SOURCE)
    assert not is_readable("0x12, 0x34, 0x56, " * 50)
    assert not is_readable("word " * 400)  # one long line


def test_copies_and_scraps_are_dropped() -> None:
    documents = [
        Document(name, content)
        for name, content in zip("abcd", (SOURCE * 2, f"\n{SOURCE * 2}", "x", SOURCE * 3), strict=True)
    ]
    assert [document.name for document in choose_documents(documents)] == ["a", "d"]


def test_the_library_is_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "b.py": SOURCE.encode() * 2,
        "a/c.py": SOURCE.replace("\n", "\r\n").encode() * 3,
        "a/latin.py": SOURCE.encode() * 4 + b"\xe9",
        "a/data/d.py": SOURCE.encode() * 5,
        "badsyntax.py": SOURCE.encode() * 6,
        "notes.txt": SOURCE.encode() * 7,
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    documents = collect_documents()
    assert documents[:2] == [Document("a/c.py", SOURCE * 3), Document("b.py", SOURCE * 2)]
    topics = [document.name for document in documents[2:]]
    assert "pydoc_data/topics/lambda" in topics
    assert topics == sorted(topics)


@pytest.mark.parametrize(("name", "expected"), [("test/a.py", True), ("json/tests/a.py", True), ("latest/a.py", False)])
def test_the_test_suite_is_told_by_its_folder(name: str, expected: bool) -> None:
    assert Document(name, "").is_test is expected


def test_conversations_come_from_docstrings() -> None:
    assert conversations(Document("a.py", SOURCE)) == [[("Return the area of a rectangle.", SOURCE.rstrip("\n"))]]
    assert conversations(Document("test/a.py", SOURCE)) == []
    assert conversations(Document("a.py", "def (")) == []
    decorated = "class Box:\n" + "".join(f"    {line}\n" for line in f"@cache\n{SOURCE}".splitlines())
    assert conversations(Document("a.py", decorated))[0][0][1].startswith("@cache\ndef area")


def test_a_chapter_answers_one_question() -> None:
    assert conversations(Document("pydoc_data/topics/lambda", " A form. \n")) == [[("Explain lambda.", "A form.")]]
    assert conversations(Document("pydoc_data/topics/lambda", "x" * 6001)) == []


def test_many_docstrings_make_conversations_of_up_to_three_turns() -> None:
    functions = [SOURCE.replace("rectangle", "rectangle" + "s" * i) for i in range(9)]
    found = conversations(Document("a.py", "\n".join(functions)))
    assert [reply + "\n" for turns in found for _, reply in turns] == functions
    assert {len(turns) for turns in found} == {1, 2, 3}


def test_conversations_are_encoded_as_the_template_renders_them() -> None:
    turns = [("How wide\nis it?", "return width"), ("And how high?", "return height")]
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    rendered = template.render(messages=messages, bos_token=BOS, eos_token=EOS)
    ids = encode_conversation(TOKENIZER, turns)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) + "\n" == rendered
    assert (ids.count(BOS_ID), ids.count(EOS_ID), ids[-1]) == (1, 2, EOS_ID)
    asked = template.render(messages=messages[:1], bos_token=BOS, eos_token=EOS, add_generation_prompt=True)
    assert asked == BOS + chat_header(turns[0][0])
    assert rendered.startswith(asked)
    parts = [{"role": "user", "content": [{"type": "text", "text": "How wide\n"}, {"type": "text", "text": "is it?"}]}]
    assert template.render(messages=parts, bos_token=BOS, eos_token=EOS, add_generation_prompt=True) == asked


@pytest.mark.parametrize("content", [SOURCE, '!"#$ naïve 漢字 \x00\t\U0001f680', ""])
def test_any_text_comes_back_and_every_byte_is_counted(content: str) -> None:
    ids = encode_text(TOKENIZER, content)
    assert TOKENIZER.decode(ids) == content
    assert encode_document(TOKENIZER, content) == [BOS_ID, *ids, EOS_ID]
    sizes = token_bytes(TOKENIZER)
    assert sum(sizes[i] for i in ids) == len(content.encode())
    assert (sizes[BOS_ID], sizes[EOS_ID], sizes[PAD_ID]) == (0, 0, 0)


def corpus(test_share: float = 0.5) -> Corpus:
    names = ("a.py", "test/b.py", "test/c.py")
    return Corpus([Document(name, f"# {name}\n" + SOURCE * 10) for name in names], TOKENIZER, test_share)


def test_an_epoch_has_its_share_of_the_test_suite() -> None:
    texts = corpus()
    (library,), (one, other) = texts.library, texts.tests
    assert len(one) == len(other)
    chats = sum(map(len, texts.chats))
    assert len(texts.epoch(random.Random(1))) == len(library) + chats + len(one)
    assert len(corpus(0.0).epoch(random.Random(1))) == len(library) + chats
    assert torch.equal(texts.epoch(random.Random(1)), texts.epoch(random.Random(1)))


def test_rows_cover_an_epoch_and_repeat_with_the_seed() -> None:
    texts = corpus()
    count = (len(texts.epoch(random.Random(1))) - 1) // 64
    rows = list(itertools.islice(texts.rows(64, seed=1), count + 1))
    assert all(row.shape == (65,) and row.dtype == torch.int64 for row in rows)
    again = list(itertools.islice(texts.rows(64, seed=1), count + 1))
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))
    epoch = texts.epoch(random.Random(1)).tolist()
    windows = [
        {tuple(epoch[shift + 64 * i : shift + 64 * i + 65]) for i in range(count)}
        for shift in range(len(epoch) - 64 * count)
    ]
    assert {tuple(row.tolist()) for row in rows[:count]} in windows


def test_an_epoch_without_a_whole_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="length: 100000 tokens"):
        next(corpus().rows(100_000, seed=1))
