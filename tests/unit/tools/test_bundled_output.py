"""What the bundled model's trainer gives out: figures, samples, the folder and its card; and a whole run in small."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from moonpool import bundled
from tests.unit.tools.bundled_instances import SMALL, SOURCE, small_model, small_tokenizer
from tools.bundled_model import __main__ as command
from tools.bundled_model import folder as folders
from tools.bundled_model import training
from tools.bundled_model.card import Run, make_card
from tools.bundled_model.chat import CHAT_TEMPLATE
from tools.bundled_model.config import BOS_ID, CONTEXT, EOS_ID, Shape
from tools.bundled_model.evaluation import BLOCK, BLOCKS, Evaluation, evaluate
from tools.bundled_model.folder import GENERATION_CONFIG, TOKENIZER_CONFIG, Folder
from tools.bundled_model.network import Llama
from tools.bundled_model.samples import PROMPTS, Sample, continue_text, make_samples
from tools.bundled_model.settings import parse_settings
from tools.bundled_model.text import Document, Split, is_held_out
from tools.bundled_model.tokenizer import encode_document, encode_text, token_bytes
from tools.bundled_model.training import Outcome, Stage

TOKENIZER = small_tokenizer()
FIGURES = Evaluation(12, 3, 2.5, 2.25, 2.4, 2.3, [2.5, 2.25], 2.6)


class Steps:
    """A stand-in for the model: each kind of token costs its own bits, and as many again for each block before it."""

    def __init__(self, bits: list[int]) -> None:
        self.bits = torch.tensor(bits)

    def losses(self, ids: Tensor, targets: Tensor) -> Iterator[Tensor]:
        assert ids.shape[1] == len(targets) <= CONTEXT
        yield self.bits[targets] * (1 + torch.arange(len(targets)) // BLOCK) * math.log(2)


def test_bits_per_byte_by_position() -> None:
    sizes = token_bytes(TOKENIZER)
    bits = [1 + index % 3 for index in range(len(sizes))]
    documents = [Document("long.py", "".join(f"{i}: {i * i}\n" for i in range(1500))), Document("short.py", SOURCE)]
    result = evaluate(cast("Llama", Steps(bits)), documents, TOKENIZER, stride=BLOCK)
    ids = [encode_document(TOKENIZER, document.text) for document in documents]
    starts = range(0, len(ids[0]) - CONTEXT, BLOCK)
    assert (result.windows, result.files) == (len(starts), 1)

    def per_byte(places: list[int]) -> float:
        """Bits per byte of the blocks at these places of the long file, at the price of the first block."""
        tokens = [token for place in places for token in ids[0][place + 1 : place + 1 + BLOCK]]
        return sum(bits[token] for token in tokens) / sum(sizes[token] for token in tokens)

    expected = [per_byte([start + block * BLOCK for start in starts]) * (1 + block) for block in range(BLOCKS)]
    assert result.by_block == pytest.approx(expected, rel=1e-5)
    assert (result.first, result.last) == (result.by_block[0], result.by_block[-1])
    both = [start for start in starts if start - CONTEXT + BLOCK in starts]
    assert 0 < len(both) < len(starts)
    once = per_byte(both)
    assert (result.same_text_first, result.same_text_last) == pytest.approx((once, once * BLOCKS), rel=1e-5)
    whole = sum(bits[token] * (1 + place % CONTEXT // BLOCK) for part in ids for place, token in enumerate(part[1:]))
    assert result.whole == pytest.approx(whole / sum(len(document.text) for document in documents), rel=1e-5)


def test_evaluation_needs_a_long_file() -> None:
    with pytest.raises(RuntimeError, match="as long as the context"):
        evaluate(cast("Llama", Steps(token_bytes(TOKENIZER))), [Document("short.py", SOURCE)], TOKENIZER, stride=BLOCK)


def test_continuations_are_greedy_or_drawn_by_the_seed() -> None:
    model = small_model()
    prompt = [BOS_ID, *encode_text(TOKENIZER, "def ")]
    greedy = continue_text(model, prompt, 6, 0.0, seed=1)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]))[0, -1] @ model.embed_tokens.weight.T
    assert greedy[0] == int(logits.argmax())
    assert greedy == continue_text(model, prompt, 6, 0.0, seed=2)
    drawn = [continue_text(model, prompt, 6, 1.0, seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn}) > 1


def test_a_continuation_stops_where_the_model_ends() -> None:
    class Ending(torch.nn.Module):
        """Ends at once: the embedding of ``</s>`` alone answers its hidden state."""

        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(8, 8, _weight=torch.eye(8))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.eye(8)[EOS_ID].expand(*ids.shape, 8)

    assert continue_text(cast("Llama", Ending()), [BOS_ID], 5, 0.0, seed=1) == [EOS_ID]


def test_samples_are_greedy_first_and_then_drawn() -> None:
    samples = make_samples(small_model(), TOKENIZER, 3, seed=1)
    assert [sample.prompt for sample in samples] == [*PROMPTS, *PROMPTS]
    assert [sample.temperature for sample in samples] == [0.0] * 3 + [0.7] * 3


def test_the_folder_gives_the_model_back_rounded(tmp_path: Path) -> None:
    model = small_model()
    folder = Folder(tmp_path / "tiny", SMALL, TOKENIZER)
    folder.write(model, "early")
    folder.write(model, "card")
    for ours, theirs in zip(model.parameters(), folder.load().parameters(), strict=True):
        assert torch.equal(ours.to(torch.bfloat16).float(), theirs)
    assert (folder.path / "README.md").read_text() == "card"
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(
        path.name for path in bundled.model_dir().iterdir()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_weights_over_the_limit_leave_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "tiny", SMALL, TOKENIZER)
    folder.write(small_model(), "old")
    monkeypatch.setattr(folders, "SIZE_LIMIT", 1000)
    with pytest.raises(RuntimeError, match="more than 1000"):
        folder.write(small_model(seed=4), "new")
    assert (folder.path / "README.md").read_text() == "old"


def test_the_shipped_folder_is_what_this_trainer_writes() -> None:
    folder = bundled.model_dir()
    for name, content in (
        ("config.json", Shape().config()),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        assert json.loads((folder / name).read_text(encoding="utf-8")) == content, name
    assert TOKENIZER_CONFIG["chat_template"] == CHAT_TEMPLATE
    assert (folder / "model.safetensors").stat().st_size <= folders.SIZE_LIMIT
    card = (folder / "README.md").read_text(encoding="utf-8")
    plain = parse_settings([])
    for part in (
        "`python -m tools.bundled_model`",
        f"seed {plain.seed}. ",
        f"{plain.tokens / 1e6:.2f} million tokens",
        f"steps of {plain.batch_tokens} tokens",
        f"Muon (rate {plain.muon_lr:g}) for the matrices and AdamW (rate {plain.adam_lr:g})",
        f"{plain.test_share:.0%} of its test suite",
        f"a window every {plain.stride} tokens",
    ):
        assert part in card, part


def run_of(evaluation: Evaluation, note: str = "") -> Run:
    return Run(
        settings=parse_settings(["--note", note, "--stride", "512", "--threads", "2"]),
        shape=Shape(),
        split=Split([Document("a.py", SOURCE)], [Document("b.py", SOURCE)], 1_230_000, 45_000),
        epoch_tokens=2_000_000,
        outcome=Outcome(steps=40, tokens=3_000_000, minutes=8.0, cpu_minutes=12.0, final_loss=3.125),
        evaluation=evaluation,
        samples=[Sample("def f():\n", 0.0, "\n    pass\n", True), Sample("x", 0.7, "y", False)],
        parameters=4_737_792,
        weight_bytes=9_480_000,
    )


def test_the_card_tells_the_figures() -> None:
    card = make_card(run_of(FIGURES, note="A remark."))
    assert card.startswith("---\nlicense: apache-2.0\n")
    for part in (
        "A Llama of 4.74 million parameters (9,480,000 bytes as bfloat16)",
        "| 0-1k (0 to 1023) | 2.500 |\n| 7-8k (7168 to 8191) | 2.250 |\n",
        "| 0k-1k | 1k-2k |\n|---|---|\n| 2.500 | 2.250 |\n",
        "with a window every 512 tokens",
        "so what stands far back does help the model.",
        "1.2 MB in 1 texts",
        "3.00 million tokens (1.5 epochs) in\n  40 steps of 4096 tokens",
        "8.0 minutes for the training loop with 2 threads\n  (6.0 minutes of processor time per thread)",
        "\n\nA remark.\n\n",
        "Prompt:\n\n```text\ndef f():\n```\n\nGreedy, ended by `</s>`:\n\n```text\n    pass\n```\n",
        "Drawn at temperature 0.7, cut at 160 tokens:\n\n```text\ny\n```\n\n## Licences\n",
    ):
        assert part in card, part


def test_the_card_does_not_boast() -> None:
    worse = dataclasses.replace(FIGURES, same_text_last=2.4)
    assert "does not profit from what stands far back" in make_card(run_of(worse))


def test_a_run_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command collects, trains, measures and writes, in this order."""
    documents = [Document(f"{name}.py", f"# {name}\n{SOURCE * 20}") for name in "abcdefgh"]
    asked: list[list[Document]] = []

    def measured(model: Llama, held_out: list[Document], tokenizer: object, stride: int) -> Evaluation:
        asked.append(held_out)
        return FIGURES

    monkeypatch.setattr(command, "collect_documents", lambda: documents)
    monkeypatch.setattr(command, "Shape", lambda: SMALL)
    monkeypatch.setattr(command, "evaluate", measured)
    monkeypatch.setattr(training, "STAGES", (Stage(1.0, 16),))
    flags = {"tokens": "256", "batch-tokens": "64", "threads": "1", "held-out-percent": "50", "sample-tokens": "2"}
    assert command.main([f"--out={tmp_path / 'tiny'}", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    assert asked == [[document for document in documents if is_held_out(document.name, 50.0)]]
    assert 0 < len(asked[0]) < len(documents)
    assert "in\n  4 steps of 64 tokens" in (tmp_path / "tiny" / "README.md").read_text(encoding="utf-8")
    heads = (
        "seed",
        "text:",
        "tokenizer:",
        "model:",
        "stage 1:",
        "step     4",
        "held-out bits per byte:",
        "wrote tiny:",
    )
    out = capsys.readouterr().out
    assert [out.index(head) for head in heads] == sorted(out.index(head) for head in heads)
