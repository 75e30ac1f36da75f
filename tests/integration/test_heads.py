"""Stacks that serve models with heads: a reranker and a classifier answer as transformers does, and chat is refused."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

from tests.integration.conftest import small_plan
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow  # stacks of its own

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(60))]
SHAPE = {
    "vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def write(folder: Path, model_type: str, kind: Any, **changed: Any) -> Any:
    """A random model with a tokenizer of words; returns it."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **{**SHAPE, **changed})
    model = kind.from_config(config, dtype=torch.float32)
    model.train(False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * 0.06)
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if model_type == "bert":
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"unk_token": "[UNK]"}')
    return model


@contextmanager
def served(folder: Path, data: Path, engines: Any) -> Iterator[httpx2.Client]:
    """A client of a stack with a gateway."""
    plan = dataclasses.replace(small_plan(folder, data), engines=engines, http_port=0)
    if engines == "one":
        plan = dataclasses.replace(plan, extra={})
    with CheckedStack(plan) as stack, httpx2.Client(base_url=f"http://{stack.http_address}", timeout=60) as client:
        yield client


def values(model: Any, tokens: list[int], **more: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), **more).logits[0]
        return logits


def test_a_cross_encoder(tmp_path: Path) -> None:
    """BERT on pairs, longer than a step, and again from the cache."""
    folder = tmp_path / "bert"
    model = write(folder, "bert", transformers.AutoModelForSequenceClassification, num_labels=1)
    query, documents = [4, 5, 6], [[7, 8], [9] * 30 + [10] * 120, [11, 12, 13]]
    text = [" ".join(WORDS[token] for token in part) for part in (query, *documents)]
    wanted = []
    for document in documents:
        first, second = [2, *query, 3], [*document, 3]
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        wanted.append(values(model, first + second, token_type_ids=types).sigmoid().item())
    with served(folder, tmp_path / "data", "split") as client:
        for _ in range(2):
            answer = client.post("/v1/score", json={"text_1": text[0], "text_2": text[1:]})
            assert answer.status_code == 200, answer.text
            assert [row["score"] for row in answer.json()["data"]] == pytest.approx(wanted, abs=1e-5)
        ranked = client.post("/v1/rerank", json={"query": text[0], "documents": text[1:]}).json()["results"]
        assert [row["index"] for row in ranked] == sorted(range(3), key=lambda index: -wanted[index])
        for path, body in (
            ("/v1/completions", {"prompt": "w1", "max_tokens": 4}),
            ("/v1/embeddings", {"input": "w1"}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400, refused.text
            assert "classifies texts" in refused.json()["error"]["message"]


def test_a_decoder_that_classifies(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    model = write(folder, "qwen3", transformers.AutoModelForSequenceClassification, num_labels=3)
    prompt = [4, 9, 30, 31] * 30
    wanted = values(model, prompt).softmax(-1)
    with served(folder, tmp_path / "data", "one") as client:
        for _ in range(2):
            answer = client.post("/v1/classify", json={"input": [prompt, prompt[:5]]})
            assert answer.status_code == 200, answer.text
            row = answer.json()["data"][0]
            assert row["probs"] == pytest.approx(wanted.tolist(), abs=1e-5)
            assert row["label"] == f"LABEL_{int(wanted.argmax())}"


def test_an_encoder_that_embeds(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    model = write(folder, "bert", transformers.AutoModel)
    with torch.inference_mode():
        states = model(torch.tensor([[2, 4, 5, 6, 3]])).last_hidden_state[0]
    wanted = torch.nn.functional.normalize(states.mean(0), dim=-1)
    with served(folder, tmp_path / "data", "split") as client:
        answer = client.post("/v1/embeddings", json={"input": "w0 w1 w2"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"][0]["embedding"] == pytest.approx(wanted.tolist(), abs=1e-5)
