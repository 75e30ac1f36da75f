"""A folder is what transformers makes of it: prompt ids, end tokens and greedy tokens, or the start is refused."""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.checkpoint.chat_template import ChatOptions
from moonpool.base.checkpoint.config import END_OF_TURN
from moonpool.base.errors import CheckpointError, UnsupportedModel
from tests.unit.engine.models.forward import Runner
from tests.unit.engine.models.quirks import OF_LLAMA, QUICK, SLOW, read, sentencepiece
from tests.unit.engine.models.test_families import CASES, reference

TEXTS = (
    "Where is the <tool> thing? It's 1234 km;  so <other>\n\n\tYes ",
    " the</s> some<s>thing <tool>  in é漢🎉",
    "hello",
    "",
)
CHAT = [{"role": "user", "content": "Hi <tool> the thing"}, {"role": "assistant", "content": "So?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
FAMILIES = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
NEW = 16
QUIRKS = [
    *((name, FAMILIES[at % len(FAMILIES)] if "class" not in name else FAMILIES[0]) for at, name in enumerate(QUICK)),
    *(
        pytest.param(name, family, marks=pytest.mark.slow)
        for name in (*QUICK, *SLOW)
        for family in FAMILIES
        if family == FAMILIES[0] or "class" not in name
    ),
]


@pytest.mark.parametrize(("name", "family"), QUIRKS)
def test_a_folder_is_what_transformers_makes_of_it(
    name: str, family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(family), folder)
    {**QUICK, **SLOW}[name](folder)
    if "refused" in name:
        with pytest.raises(UnsupportedModel) as caught:
            load_config(folder)
        assert caught.value.field.split(".")[0] in read(folder, "config.json")
        return
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Fails where prompt ids, texts, end tokens or greedy tokens are not those of transformers."""
    config, ours = load_config(folder), Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special=special) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    if theirs.chat_template is not None:
        for tools in ((), (WEATHER,)) if "tools" in ours.chat_template else ((),):
            expected = theirs.apply_chat_template(CHAT, tools=list(tools) or None, tokenize=False)
            assert ours.render_chat(CHAT, tools, ChatOptions(add_generation_prompt=False)).text == expected
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ends = {theirs.eos_token_id, *_ids(model.generation_config.eos_token_id)}
    ends |= set(_ids(read(folder, "config.json").get("eos_token_id")))
    named = (folder / "tokenizer.json").read_text()
    added = {index: str(token) for index, token in theirs.added_tokens_decoder.items()}
    ends |= {index for index, token in added.items() if token in END_OF_TURN and token in named}
    ends -= {index for index in ends if index is None or added.get(index, named) not in named}  # in no file
    assert set(config.eos_token_ids) == ends
    prompt = ours.encode(TEXTS[0])
    tokens = Runner(folder, torch.float32).generate([prompt], NEW, 64, 64)[0]
    model.train(False)
    given = torch.tensor([prompt])
    answered = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=NEW,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert tokens == answered[0, len(prompt) :].tolist()


MODEL_TYPES = dict(reversed([*CASES.values()]))
"""The families, each with the fields of its first case."""
SPREAD = [
    (name, family)
    for family, name in zip(MODEL_TYPES, itertools.cycle(name for name in {**QUICK, **SLOW} if name not in OF_LLAMA))
]


@pytest.mark.parametrize(("name", "family"), SPREAD)
@pytest.mark.slow
def test_a_folder_of_any_family_is_what_transformers_makes_of_it(
    name: str, family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every family has a quirk of its own, whose tokenizer is the random checkpoint's."""
    folder = tmp_path / "model"
    reference(family, {**MODEL_TYPES[family], "vocab_size": 512}).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint("tiny-llama") / file, folder)
    {**QUICK, **SLOW}[name](folder)
    check_folder(folder)


def _ids(value: int | list[int] | None) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())


def test_a_folder_without_a_default_template_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("tiny-llama"), folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    with pytest.raises(CheckpointError, match="none of tool_use is named default"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("kind", ["bpe", "prepend", "unigram"])
def test_streamed_text_is_the_whole_text_where_tokens_are_skipped(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Decoders like SentencePiece's drop the first space; a skipped token must not make the next token the first."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("tiny-llama"), folder)
    sentencepiece(kind)(folder)
    tokenizer = Tokenizer.load(folder)
    seed = 29
    print("seed", seed)
    draw = random.Random(seed)
    characters = [[3 + byte for byte in text.encode()] for text in ("\n", "x", "é", "漢", "🎉")]
    for _ in range(3000):
        runs = [draw.choice(([1], [2], [draw.randrange(259, 300)], draw.choice(characters))) for _ in range(12)]
        ids = [token for run in runs[: draw.randrange(12)] for token in run]
        stream = tokenizer.stream()
        pieces = [stream.push([token]) for token in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids), ids
