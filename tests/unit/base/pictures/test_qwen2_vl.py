"""Tokens of Qwen2.5-VL's pictures, from width and height alone, beside transformers' processor."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.errors import InvalidRequest
from moonpool.base.pictures.files import Picture
from moonpool.base.pictures.qwen2_vl import MAX_RATIO, Qwen2VLRule
from moonpool.base.pictures.rule import with_pictures
from tests.pictures import CELL, PATCH_PROCESSOR, patch_model

SEED = 20_29


def rule_of(folder: Path) -> Qwen2VLRule:
    found = read_rule(folder, lambda: Tokenizer.load(folder))
    assert isinstance(found, Qwen2VLRule), found
    return found


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> Qwen2VLRule:
    return rule_of(patch_model(tmp_path_factory.mktemp("model")))


def test_a_picture_has_a_token_for_each_cell(rule: Qwen2VLRule) -> None:
    assert (rule.cell, rule.components) == (CELL, (0, 0, 1, 1, 1, 2, 2, 2))
    assert list(rule.tokens((2, 3))) == [rule.mark] * 6


def test_grids_are_those_of_transformers_processor(rule: Qwen2VLRule) -> None:
    pytest.importorskip("PIL")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    size: dict[str, int] = PATCH_PROCESSOR["size"]
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    sizes = [(draw.randrange(1, 400), draw.randrange(1, 400)) for _ in range(600)]
    sizes += [(1, 1), (1, MAX_RATIO), (MAX_RATIO * 7, 7), (24, 24), (40, 8), (8, 40), (5000, 4999)]
    for width, height in sizes:
        if max(width, height) > MAX_RATIO * min(width, height):
            continue
        rows, columns = smart_resize(height, width, CELL, size["shortest_edge"], size["longest_edge"])
        assert rule.grid(width, height, "auto") == (rows // CELL, columns // CELL), (width, height)


def test_a_picture_that_is_too_long_is_refused_by_its_size(rule: Qwen2VLRule) -> None:
    with pytest.raises(InvalidRequest, match="a picture of 201 x 1 pixels: one side may be at most 200 times"):
        with_pictures("messages", rule, [rule.mark], [Picture(b"x", 201, 1)])


def test_older_folders_say_the_same_in_other_words(rule: Qwen2VLRule, tmp_path: Path) -> None:
    """Flat, with `rope_scaling`, and pixels by the processor's older names."""
    path = patch_model(tmp_path) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    path.write_text(json.dumps({**text, **config, "model_type": "qwen2_vl"}))
    processor = {name: value for name, value in PATCH_PROCESSOR.items() if name != "size"}
    processor |= {"min_pixels": 2 * CELL**2, "max_pixels": 30 * CELL**2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = rule_of(tmp_path)
    assert (found.components, found.fewest, found.most) == (rule.components, rule.fewest, rule.most)


def test_since_qwen3_components_come_in_turns(tmp_path: Path) -> None:
    path = patch_model(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen3_vl"}))
    assert rule_of(tmp_path).components == (0, 1, 2, 0, 1, 2, 0, 1)


def test_low_detail_has_fewer_pixels(rule: Qwen2VLRule) -> None:
    assert rule.most_pixels("low") == rule.most_pixels("high") == rule.most
    larger = Qwen2VLRule(rule.mark, rule.settings, CELL, rule.fewest, 1 << 22, rule.components)
    assert larger.grid(2048, 1024, "low") < larger.grid(2048, 1024, "high")
