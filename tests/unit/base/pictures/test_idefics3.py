"""Tokens of Idefics3's pictures, from width and height alone, beside transformers' processor."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.media import media_digest
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.files import Picture
from moonpool.base.pictures.idefics3 import Idefics3Rule
from moonpool.base.pictures.rule import with_pictures
from tests.pictures import LONGEST, PROCESSOR, ROWS, SIDE, picture_model

SEED = 20_26


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def rule(folder: Path, tokenizer: Tokenizer) -> PictureRule:
    found = read_rule(folder, lambda: tokenizer)
    assert isinstance(found, Idefics3Rule), found
    return found


def test_the_rule_is_the_checkpoints(rule: Idefics3Rule) -> None:
    assert (rule.rows, rule.side, rule.longest, rule.splits) == (ROWS, SIDE, LONGEST, True)


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [(1, 1, (4, 4)), (128, 128, (4, 4)), (128, 96, (3, 4)), (96, 128, (4, 3)), (9999, 3, (1, 4)), (3, 9999, (4, 1))],
)
def test_grids(rule: Idefics3Rule, width: int, height: int, grid: tuple[int, int]) -> None:
    assert rule.grid(width, height, "") == rule.grid(width, height, "high") == grid
    assert rule.grid(width, height, "low") == (0, 0)
    assert sum(token == rule.mark for token in rule.tokens(grid)) == ROWS * (grid[0] * grid[1] + 1)


def test_grids_and_tokens_are_those_of_transformers_processor(rule: Idefics3Rule, tokenizer: Tokenizer) -> None:
    pytest.importorskip("PIL")
    import numpy as np
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    processor: Any = Idefics3ImageProcessorPil(**PROCESSOR)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    sizes = [(draw.randrange(1, 300), draw.randrange(1, 300)) for _ in range(200)]
    sizes += [(1, 1), (1, 4000), (4000, 1), (5000, 4999), (31, 32), (33, 32), (LONGEST, SIDE + 1)]
    for width, height in sizes:
        image = np.zeros((3, height, width), np.uint8)
        made = processor([[image]], return_row_col_info=True, input_data_format="channels_first")
        grid = made["rows"][0][0], made["cols"][0][0]
        assert rule.grid(width, height, "auto") == grid, (width, height)
        shown: Any = get_image_prompt_string
        text = shown(*grid, ROWS, "<fake_token_around_image>", "<image>", "<global-img>")
        assert rule.tokens(grid) == tokenizer.encode(text, False)


def test_each_mark_becomes_a_pictures_tokens(rule: Idefics3Rule) -> None:
    first, second = Picture(b"one", 128, 128), Picture(b"two", 5, 5, "low")
    tokens, media = with_pictures("messages", rule, [5, rule.mark, 6, 7, rule.mark], [first, second])
    one, two = rule.tokens((4, 4)), rule.tokens((0, 0))
    assert tokens == array("i", [5, *one, 6, 7, *two])
    assert [(item.begin, item.end, item.content) for item in media] == [
        (1, 1 + len(one), b"one"),
        (len(one) + 3, len(tokens), b"two"),
    ]
    assert media[0].digest == media_digest(b"one", (128, 128, "", (4, 4), rule.settings))
    with pytest.raises(InvalidRequest, match="shows 1 of 2"):
        with_pictures("messages", rule, [5, rule.mark], [first, second])
    with pytest.raises(InvalidRequest, match="shows 1 of 0"):
        with_pictures("messages", rule, [5, rule.mark], [])


def test_digests_differ_by_file_size_detail_and_settings(rule: Idefics3Rule) -> None:
    pictures = [Picture(b"a", 9, 9), Picture(b"b", 9, 9), Picture(b"a", 9, 8), Picture(b"a", 9, 9, "low")]
    digests = {with_pictures("m", rule, [rule.mark], [picture])[1][0].digest for picture in pictures}
    assert len(digests) == len(pictures)


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("config.json", {"vision_config": None}, "no encoder"),
        ("config.json", {"model_type": "llava"}, "'llava' are not built"),
        ("config.json", {"image_token_id": 1}, "image_token_id"),
        ("processor_config.json", {"image_seq_len": 64}, "image_seq_len"),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": -1}}, "longest_edge"),
    ],
)
def test_why_a_checkpoint_takes_no_pictures(
    file: str, change: dict[str, Any], why: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    import json

    path = picture_model(tmp_path) / file
    data = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    found = read_rule(tmp_path, lambda: tokenizer)
    assert isinstance(found, str)
    assert why in found


def test_a_folder_without_processor_takes_no_pictures(tmp_path: Path, tokenizer: Tokenizer) -> None:
    picture_model(tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    assert "no preprocessor_config.json" in str(read_rule(tmp_path, lambda: tokenizer))
    assert read_rule(tmp_path / "model.gguf", lambda: tokenizer) == "the checkpoint has no encoder of pictures"
