"""What docs/models.md says starts as published, through the services: two turns of each row, in a stack of its own.

`tests/unit/engine/models/test_published.py` has the rows, and compares more of each without services.
"""

import shutil
from pathlib import Path

import pytest
import transformers

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import BLOCK, SEED, small_plan, tokens
from tests.integration.stack import CheckedStack
from tests.unit.engine.models.test_families import TINY
from tests.unit.engine.models.test_parity import assert_greedy
from tests.unit.engine.models.test_published import FOLDERS, GGUF, file_of, folder_of, whole_of
from tests.unit.engine.models.test_wrapped import WHOLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # stacks of its own
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of as many tokens as the rows have."""
    sizes = {"vocab_size": TINY["vocab_size"]}
    return create("tiny-llama", tmp_path_factory.mktemp("vocabulary") / "model", seed=SEED, overrides=sizes)


def two_turns(model: transformers.PreTrainedModel, checkpoint: Path, data: Path) -> None:
    """A prompt and its continuation: tokens as transformers has them, the second turn behind the first one's blocks."""
    prompt = tokens(2 * BLOCK + 5, "published")
    with CheckedStack(small_plan(checkpoint, data)) as stack, Client(stack.address) as client:
        first = client.generate(token_ids=prompt, sampling=GREEDY)
        assert first.usage.cached_tokens == 0
        assert_greedy(model, prompt, list(first.token_ids))
        turn = [*prompt, *first.token_ids, 9, 10, 11]
        second = client.generate(token_ids=turn, sampling=GREEDY)
        assert second.usage.cached_tokens == 2 * BLOCK
        assert_greedy(model, turn, list(second.token_ids))


def folder(tmp_path: Path, vocabulary: Path) -> Path:
    """An empty folder with the tokenizer."""
    found = tmp_path / "model"
    found.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (vocabulary / name).exists():
            shutil.copy(vocabulary / name, found)
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_served_as_published(name: str, vocabulary: Path, tmp_path: Path) -> None:
    checkpoint = folder(tmp_path, vocabulary)
    two_turns(folder_of(name, checkpoint), checkpoint, tmp_path / "data")


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_with_further_parts_is_served_as_published(name: str, vocabulary: Path, tmp_path: Path) -> None:
    checkpoint = folder(tmp_path, vocabulary)
    two_turns(whole_of(name, checkpoint), checkpoint, tmp_path / "data")


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_is_served_as_converted(name: str, vocabulary: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    two_turns(file_of(name, file, vocabulary), file, tmp_path / "data")
