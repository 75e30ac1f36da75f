"""Gemma 3 270M from its GGUF file (Q4_K_M): greedy answers are transformers', also behind the window, and make sense.

`moonpool pull gemma3` fetches the model; without it these tests are skipped.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client
from tests.integration.reference import GAP_TOLERANCE, Reference
from tests.integration.stack import CheckedStack
from tests.integration.test_trained import GREEDY, ROOT, plan_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model() -> Path:
    """The fetched file."""
    file = cached_model("gemma3", cache_folder())
    if file is None:
        pytest.skip("Gemma 3 is not here; `moonpool pull gemma3` fetches it")
    return file


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    with CheckedStack(plan_of(model, tmp_path_factory.mktemp("gemma"), "float32", "none")) as running:
        yield running


def test_windows_and_end_tokens(model: Path) -> None:
    config = load_config(model)
    assert [layer.attention.window for layer in config.decoder.layers] == ([512] * 5 + [None]) * 3
    assert config.eos_token_ids == (1, 106)  # <eos>, <end_of_turn>


def test_greedy_within_and_behind_the_window(stack: CheckedStack, model: Path) -> None:
    """Cold or behind the shorter prompt, then from the cache."""
    pages = sorted(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "adr").glob("*.md"))
    text, reference = Tokenizer.load(model).encode("\n".join(pages)[:12_000]), Reference(model, attention="eager")
    with Client(stack.address) as client:
        for length, hits in ((200, (0, 192)), (1500, (192, 1472))):
            for cached in hits:
                answer = client.generate(token_ids=text[:length], sampling=GREEDY)
                assert answer.usage.cached_tokens == cached
                reference.assert_greedy(text[:length], answer.token_ids, GAP_TOLERANCE)
                stack.check_at_rest()


def test_answers_make_sense(stack: CheckedStack) -> None:
    """A base model goes on with a text. It has no chat template, and says so."""
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    with Client(stack.address) as client:
        answer = client.generate(prompt="Water boils at a temperature of", sampling=sampling)
        assert "100 degrees" in answer.text, answer.text
        with pytest.raises(InvalidRequest, match="no chat template"):
            client.generate(messages=[{"role": "user", "content": "Hello"}], sampling=sampling)
