"""A real vLLM on the CPU with a tiny vision model behind a conductor: pictures are answered, and found again."""

import json
from pathlib import Path

import pytest
import tokenizers

from moonpool.base.pictures.files import Picture
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Message
from tests.engines.servers import BLOCK_SIZE, PYTHON, vllm
from tests.pictures import PictureReference, add_weights, patch_model, picture_file
from tests.unit.conductor.stack import stack
from tests.unit.interop.adapter.test_adapter import adapter

ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
WIDTH, HEIGHT = 100, 60
BEFORE = "Please look at this picture: "
"""So that the picture, of 24 tokens, begins in the first block and ends in the second one."""
NEAR = 1e-3
"""By how much a greedy token's logit may lie below the reference's best one."""
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make test-engines` installs it"),
]


def vision_model(folder: Path) -> Path:
    """Qwen2.5-VL's shape, with heads that vLLM computes on a CPU, and what transformers' processor classes ask for."""
    patch_model(folder)
    tokenizer_file = str(folder / "tokenizer.json")
    vocabulary = tokenizers.Tokenizer.from_file(tokenizer_file)
    vocabulary.add_special_tokens([tokenizers.AddedToken("<|video_pad|>", special=True)])
    vocabulary.save(tokenizer_file)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    marks = {f"{mark}_token_id": vocabulary.token_to_id(f"<|{mark}|>") for mark in ("vision_start", "vision_end")}
    marks["video_token_id"] = vocabulary.token_to_id("<|video_pad|>")
    assert vocabulary.get_vocab_size() <= json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<end_of_utterance>"}
    for name, changes in (
        ("config.json", {"text_config": {"bos_token_id": None, **heads, "rope_parameters": rope}, **marks}),
        ("processor_config.json", {"processor_class": "Qwen2_5_VLProcessor"}),
        ("preprocessor_config.json", {"processor_class": "Qwen2_5_VLProcessor"}),
        ("tokenizer_config.json", tokenizer),
    ):
        fields = json.loads((folder / name).read_text())
        for key, value in changes.items():
            fields[key] = {**fields[key], **value} if isinstance(value, dict) else value
        (folder / name).write_text(json.dumps(fields))
    return add_weights(folder)


def asked(file: bytes, words: str) -> list[Message]:
    picture = Picture(file, WIDTH, HEIGHT)
    return [{"role": "user", "content": "", "parts": [{"text": BEFORE}, {"picture": picture}, {"text": words}]}]


async def test_pictures_are_answered_and_found_again_and_never_for_another_one(tmp_path: Path) -> None:
    folder = vision_model(tmp_path / "model")
    reference = PictureReference(folder)
    first, second = picture_file(WIDTH, HEIGHT, seed=1), picture_file(WIDTH, HEIGHT, seed=2)
    async with (
        vllm(tmp_path / "vllm", blocks=64, model=folder) as server,
        stack(folder=folder) as running,
        adapter(server.url, running.address, "vllm-0", model=str(folder)),
    ):
        for name in ("vllm-0-prefill", "vllm-0-decode"):
            await running.until(lambda name=name: running.cluster.find(name) is not None)  # type: ignore[misc]
        cached, held = [], []
        for file, words in ((first, "What is it?"), (first, "Which colours has it?"), (second, "What is it?")):
            messages = asked(file, words)
            found = await running.client.generate(messages=messages, sampling=ANSWER)
            inputs = reference.inputs(reference.text_of(messages), [file])
            rows = reference.logits(inputs, found.token_ids[:-1])
            for row, token in zip(rows, found.token_ids, strict=True):
                assert row.max() - row[token] < NEAR
            told = await running.client.explain(found.request_id)
            cached.append(found.usage.cached_tokens)
            held.append([candidate.local_blocks for candidate in told.candidates])
            await running.rest()
        assert cached == [0, BLOCK_SIZE, 0]
        assert held == [[0], [1], [0]], "by the events"
