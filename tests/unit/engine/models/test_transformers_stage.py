"""Architectures without a family: transformers' own code over the paged pool gives the same tokens, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moonpool.base.checkpoint import config_hash, inspect_checkpoint, load_config
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.transformers_stage import TransformersStage, load_transformers_stage
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.setup import engine_setup
from tests.unit.engine.models.forward import Runner
from tests.unit.engine.models.test_families import LENGTHS, NEW, TINY, reference
from tests.unit.engine.models.test_parity import assert_greedy

SERVED = ("apertus", "afmoe", "nanochat", "phimoe", "bitnet", "flex_olmo")


@pytest.mark.parametrize("model_type", SERVED)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = reference(model_type, {"head_dim": 16, "num_hidden_layers": 2})
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0] not in FAMILIES
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]
    runner = Runner(tmp_path, torch.float32)
    assert "transformers" in runner.stages[0].not_native[0]
    for prompt, output in zip(prompts, runner.generate(prompts, NEW, chunk=16, budget=40), strict=True):
        assert_greedy(model, prompt, output)


def test_another_configuration_has_kv_of_its_own(tmp_path: Path) -> None:
    reference("apertus", {"head_dim": 16, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    first = load_config(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert config_hash(load_config(tmp_path)) != config_hash(first)
    path.write_text(json.dumps(config | {"transformers_version": "6.0", "dtype": "bfloat16"}))
    assert config_hash(load_config(tmp_path)) == config_hash(first)
    assert "transformers' own modelling code" in inspect_checkpoint(tmp_path).computed


@pytest.mark.parametrize(("model_type", "words"), [("codegen", "cannot be served"), ("jamba", "recurrent state")])
def test_what_does_not_attend_through_the_interface_is_refused(model_type: str, words: str, tmp_path: Path) -> None:
    """By name, when it is loaded: it has a rotary embedding of its own kind, or a state beside KV."""
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, "rotary_dim": 8, "num_hidden_layers": 2})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedModel, match=words):
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 2)


def test_neither_code_nor_pickles_of_a_folder_are_read(tmp_path: Path) -> None:
    model = reference("apertus", {"head_dim": 16, "num_hidden_layers": 2})
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    there = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "harm.Harm", "AutoModelForCausalLM": "harm.Harm"}
    (tmp_path / "config.json").write_text(json.dumps(there | {"auto_map": names}))
    (tmp_path / "harm.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w').close()\n")
    load_transformers_stage(tmp_path, config, torch.float32, torch.device("cpu"))
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        load_transformers_stage(tmp_path, config, torch.float32, torch.device("cpu"))
    assert not (tmp_path / "was here").exists()


def test_model_impl(tmp_path: Path) -> None:
    """Llama through transformers' own code: the same tokens, and KV of its own; an unknown architecture is refused."""
    model = reference("llama", {"num_hidden_layers": 2})
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path, "transformers")
    assert load_config(tmp_path, "moonpool") == load_config(tmp_path) != config
    assert inspect_checkpoint(tmp_path, model_impl="transformers").computed == (
        "all layers fallback (transformers' own modelling code)"
    )
    runner = Runner(tmp_path, torch.float32, config=config)
    assert isinstance(runner.stages[0], TransformersStage)
    prompt = list(range(3, 40))
    [output] = runner.generate([prompt], NEW, chunk=16, budget=40)
    assert_greedy(model, prompt, output)
    plain: dict[str, Any] = {"conductor": ("127.0.0.1:1",), "model": str(tmp_path)}
    setups = [engine_setup(PrefillConfig(**plain, model_impl=impl)) for impl in ("auto", "transformers")]
    assert setups[0].namespace != setups[1].namespace
    assert setups[0].model.config_hash == setups[1].model.config_hash
    assert setups[1].spec.model_impl == "transformers"
    reference("apertus", {"head_dim": 16, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    assert load_config(tmp_path, "transformers") == load_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="no family describes ApertusForCausalLM") as caught:
        load_config(tmp_path, "moonpool")
    assert caught.value.field == "model_impl"


def test_it_runs_in_one_stage_only(tmp_path: Path) -> None:
    reference("apertus", {"head_dim": 16, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 1)
    assert caught.value.field == "pipeline_parallel_size"


def test_deterministic_mode_is_refused(tmp_path: Path) -> None:
    reference("apertus", {"head_dim": 16, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 2, deterministic=True)
    assert caught.value.field == "deterministic"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sliding_window": 100}, "not told of the window of 100 tokens"),
        ({"attention_chunk_size": 128}, "attention in chunks"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_masks_that_a_short_prompt_cannot_show_are_refused(
    changed: dict[str, object], words: str, tmp_path: Path
) -> None:
    """The check at load has 40 tokens: what begins behind them must be refused by what config.json says."""
    reference("apertus", {"head_dim": 16, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UnsupportedModel, match=words):
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 2)


def test_two_models_in_one_process_keep_their_pools(tmp_path: Path) -> None:
    models = [reference(kind, {"head_dim": 16, "num_hidden_layers": 2}) for kind in ("apertus", "nanochat")]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
    runners = [Runner(tmp_path / str(number), torch.float32) for number in range(2)]
    for model, runner in zip(models, runners, strict=True):
        assert_greedy(model, [5, 9, 17], runner.generate([[5, 9, 17]], 4, chunk=16, budget=40)[0])


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    reference("apertus", {"head_dim": 16, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["NobodysForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="NobodysForCausalLM is unknown to transformers too"):
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 2)
