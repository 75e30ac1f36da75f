"""Every family over ranks: greedy float32 tokens, KV and hashes are those of one process, which are transformers'."""

import os
from array import array
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.base.checkpoint import load_config
from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.ranks import check_ranks
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.memory import shared_memory
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.parallel.page import RankPage, page_bytes
from moonpool.engine.parallel.ranks import Ranks
from tests.unit.engine.models.test_families import CASES, reference
from tests.unit.engine.models.test_quantised_folders import FORMATS, configure
from tests.unit.engine.ranks import SIZE, RankedStages, ranked

PROMPT = [7 + number * 13 % 90 for number in range(2 * SIZE + 9)]
TABLE = (4, 1, 6, 2, 7)
RECURRENT = [
    *("granite, hybrid", "granite, hybrid, dense", "kimi_linear", "lfm2", "lfm2, biases", "lfm2_moe"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "falcon_h1", "falcon_h1, norm"),
    *("nemotron_h", "nemotron_h, experts", "nemotron_h, latent experts"),
]
QUICK = ("falcon, new", "gemma4, shared KV", "gpt2", "gpt_oss", "deepseek_v2, groups", "deepseek_v32", "olmo2")
"""Grouped projections, layers of other layers' KV, inputs first, experts in one tensor, MLA, chosen keys, norms over
all heads."""


def answer(stages: RankedStages, new: int) -> list[int]:
    """Greedy tokens behind a prompt in two chunks."""
    parts = [SequenceStep(array("i", PROMPT[: 2 * SIZE]).tobytes(), 0, TABLE[:2])]
    parts.append(SequenceStep(array("i", PROMPT[2 * SIZE :]).tobytes(), 2 * SIZE, TABLE[:3], SampleSpec()))
    stages.run(Step(1, (parts[0],), layer_events=True))
    done, tokens = stages.run(Step(2, (parts[1],), layer_events=True)), list[int]()
    while True:
        [token] = done.sampled
        assert token is not None
        tokens.append(token)
        if len(tokens) == new:
            return tokens
        last, start = array("i", [token]).tobytes(), len(PROMPT) + len(tokens) - 1
        done = stages.run(Step(len(tokens) + 2, (SequenceStep(last, start, TABLE, SampleSpec()),)))


def kv(stages: RankedStages) -> list[tuple[bytes, int]]:
    """Slices of full blocks, with their hashes."""
    slices = [stages.pool.read(layer, block) for layer in range(stages.pool.layout.layers) for block in TABLE[:2]]
    return [(bytes(data), value) for data, value in slices]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(case, ranks, marks=() if case in QUICK and ranks == 2 else pytest.mark.slow)
        for case in CASES
        if case not in RECURRENT
        for ranks in (2, 4)
    ],
)
def test_tokens_and_kv_are_those_of_one_process(case: str, ranks: int, tmp_path: Path) -> None:
    reference(*CASES[case]).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    check_ranks(config.decoder, ranks, config.architecture)
    with ranked(tmp_path, 1) as alone, ranked(tmp_path, ranks) as several:
        assert answer(several, 6) == answer(alone, 6)
        assert several.layers() == alone.layers()
        for (data, value), (expected, _) in zip(kv(several), kv(alone), strict=True):
            assert value == slice_hash(data)
            found, wanted = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (data, expected))
            assert wanted.any()
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["gptq, 4 bits", "gptq, 8 bits", "awq", "modelopt, nvfp4"])
def test_ranks_keep_the_codes_of_a_file(form: str, tmp_path: Path) -> None:
    """Rows of some projections, whole groups of inputs of others, and the head's rows."""
    settings, quantise, _ = FORMATS[form]
    reference("llama", {"intermediate_size": 128}).save_pretrained(tmp_path)
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            parts, _ = quantise(*weight.shape)
            stored |= {f"{name.removesuffix('.weight')}{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = weight
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, settings)
    config = load_config(tmp_path)
    page = shared_memory()
    os.truncate(page, page_bytes(2))
    for rank in range(2):
        ranks = Ranks(RankPage(page, rank, 2, 1.0))
        kept, dense = (
            load_stage(tmp_path, config, torch.float32, 0, 4, kept=KeptWeights(how), ranks=ranks)
            for how in ("auto", "none")
        )
        assert kept.changed_weights == ""
        assert kept.head is not None
        assert dense.head is not None
        assert torch.equal(kept.head.dense(), dense.head.dense())
        for mine, theirs in zip(kept.layers, dense.layers, strict=True):
            for place in ("attention.qkv", "attention.output", "feed_forward.gate_up", "feed_forward.down"):
                packed, plain = attrgetter(place)(mine), attrgetter(place)(theirs)
                assert torch.equal(packed.dense(), plain.dense()), place
                assert packed.nbytes < plain.nbytes / 2, place
    os.close(page)


@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers_are_refused_by_name(case: str, tmp_path: Path) -> None:
    reference(*CASES[case]).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="recurrent state") as refused:
        check_ranks(config.decoder, 2, config.architecture)
    assert refused.value.field == "tensor_parallel_size"
