"""SmolLM2-135M-Instruct from its GGUF file: greedy answers are those of transformers, from short to full contexts.

`moonpool pull smollm2` fetches the model; without it these tests are skipped.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import StackPlan
from moonpool.client import Client, Message
from tests.integration.conftest import with_flags
from tests.integration.reference import GAP_TOLERANCE, Reference, error_of
from tests.integration.stack import CheckedStack
from tests.integration.test_parity import TIMES_ERROR
from tests.unit.engine.models.packed_reference import pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
BLOCK = DEFAULT_BLOCK_SIZE
NEW = 24
ROOT = Path(__file__).parents[2]
FIRST_QUESTION = "Write a function that adds two numbers."
"""README's. A model of 135M parameters knows how to; of capitals, its card's sampling often makes another answer."""
QUESTIONS = (
    "What is the capital of France?",
    "How many people live there?",
    "Which river runs through it?",
    "Name three famous buildings of that city.",
    "Which of them is the oldest?",
    "Write one sentence about its history.",
    "Translate that sentence into French.",
    "What should I eat there?",
    "And what should I drink with it?",
    "Now sum up our conversation in two sentences.",
)


@pytest.fixture(scope="module")
def model() -> Path:
    """The fetched file."""
    file = cached_model("smollm2", cache_folder())
    if file is None:
        pytest.skip("SmolLM2 is not here; `moonpool pull smollm2` fetches it")
    return file


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> list[int]:
    """More than 8,000 tokens of English prose."""
    pages = sorted(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "adr").glob("*.md"))
    tokens = tokenizer.encode("\n".join(pages))
    assert len(tokens) > 8000
    return tokens


@pytest.fixture(scope="module", params=[("float32", "none"), ("bfloat16", "none"), ("bfloat16", "auto")], ids="-".join)
def how(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Element type, and how weights are held: dequantised, or in the file's own codes."""
    found: tuple[str, str] = request.param
    return found


def reference_of(model: Path, dtype: torch.dtype, quantization: str) -> Reference:
    made = Reference(model, dtype, attention="sdpa")
    if quantization == "auto":
        pack(made.model, quantization)
    return made


@pytest.fixture(scope="module")
def reference(model: Path, how: tuple[str, str]) -> Reference:
    return reference_of(model, torch.float32, how[1])


def plan_of(model: Path, folder: Path, dtype: str, quantization: str) -> StackPlan:
    plan = StackPlan(model=str(model), data_dir=folder, dtype=dtype, threads=1, kv_cache_memory_bytes=512 << 20)
    for kind in ("prefill", "decode"):
        plan = with_flags(plan, kind, "--set", f"quantization={quantization}")
    return plan


@pytest.fixture(scope="module")
def stack(how: tuple[str, str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    with CheckedStack(plan_of(model, tmp_path_factory.mktemp("stack"), *how)) as running:
        yield running


@pytest.fixture(scope="module")
def tolerance(how: tuple[str, str], model: Path, reference: Reference, text: list[int]) -> float:
    """The largest gap to the reference's best logit: rounding's in float32, a multiple of bfloat16's own error."""
    if how[0] == "float32":
        return GAP_TOLERANCE
    found = TIMES_ERROR * error_of(reference_of(model, torch.bfloat16, how[1]), reference, text[:400])
    best, _, third = reference.logits(text[:400]).topk(3).values.unbind(1)
    print(f"tolerance {found:.3f}, rejects the third choice at {float((best - third > found).float().mean()):.0%}")
    return found


GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("length", [100, 1000, 3000, 8000])
def test_greedy_at_every_length(
    length: int, stack: CheckedStack, reference: Reference, tolerance: float, text: list[int]
) -> None:
    """Cold, then from the cache."""
    prompt = text[:length]
    with Client(stack.address) as client:
        cold = client.generate(token_ids=prompt, sampling=GREEDY)
        stack.check_at_rest()
        again = client.generate(token_ids=prompt, sampling=GREEDY)
    print(f"TTFT cold {cold.timing.ttft_s:.2f} s, cached {again.timing.ttft_s:.2f} s; {cold.text!r}")
    assert again.usage.cached_tokens == min(length // BLOCK * BLOCK, length - 1)
    for answer in {tuple(cold.token_ids), tuple(again.token_ids)}:
        assert len(answer) == NEW
        reference.assert_greedy(prompt, answer, tolerance)


def test_the_first_answer_is_a_good_one(stack: CheckedStack) -> None:
    """To README's own question. Nobody gives a temperature: the model's card does. A given one wins."""
    question: list[Message] = [{"role": "user", "content": FIRST_QUESTION}]
    assert FIRST_QUESTION in (ROOT / "README.md").read_text(encoding="utf-8")

    def answers(sampling: SamplingParams) -> list[str]:
        return [choice.text for choice in client.generate(messages=question, sampling=sampling).choices]

    with Client(stack.address) as client:
        unsaid = answers(SamplingParams(max_tokens=64, n=8, seed=1))
        assert unsaid == answers(SamplingParams(max_tokens=64, n=8, seed=1, temperature=0.2, top_p=0.9))
        assert sum("def " in text and "return" in text for text in unsaid) >= 7, unsaid
        assert unsaid != answers(SamplingParams(max_tokens=64, n=8, seed=1, temperature=1.0, top_p=1.0))


def test_a_chat_of_ten_turns(stack: CheckedStack, reference: Reference, tolerance: float, tokenizer: Tokenizer) -> None:
    """Each answer is the reference's, and each turn finds the blocks of the last one's prompt and answer."""
    turns: list[Message] = []
    known, shares = 0, []
    with Client(stack.address) as client:
        for question in QUESTIONS:
            turns.append({"role": "user", "content": question})
            prompt = tokenizer.apply_chat_template(turns)
            answer = client.generate(messages=turns, sampling=SamplingParams(max_tokens=96, temperature=0.0))
            assert answer.usage.prompt_tokens == len(prompt)
            reference.assert_greedy(prompt, answer.token_ids, tolerance)
            assert answer.usage.cached_tokens >= known // BLOCK * BLOCK
            shares.append(answer.usage.cached_tokens / len(prompt))
            turns.append({"role": "assistant", "content": answer.text})
            known = common(prompt + answer.token_ids[:-1], tokenizer.apply_chat_template(turns))
            stack.check_at_rest()
    print(f"cached share of turns 2 to 10: {sum(shares[1:]) / len(shares[1:]):.3f}; last prompt {len(prompt)} tokens")


def common(first: list[int], second: list[int]) -> int:
    """Tokens that two sequences begin with alike: an answer may have been spelled by other tokens than its text is."""
    return next((i for i, (each, other) in enumerate(zip(first, second, strict=False)) if each != other), len(first))
