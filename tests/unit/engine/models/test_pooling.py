"""Heads of decoders, and encoders: values of whole prompts equal those of transformers, in chunks and side by side."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.base.checkpoint import config_hash, load_config
from moonpool.base.errors import CheckpointError, ConfigError, UnsupportedModel
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.whole_prompt_stage import WholePromptStage, token_types
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.setup import engine_setup
from tests.unit.engine.models.forward import BLOCK, Runner
from tests.unit.engine.models.test_families import HEAD, TINY, reference
from tests.unit.engine.stages import ids, stages

LENGTHS = (37, 5, 37, 17)
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": HEAD, "mistral": {}, "gemma": HEAD, "gemma2": HEAD, "gemma3_text": HEAD,
    "phi3": {}, "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 96}, "mixtral": {},
}  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "electra")
SPECIAL = {"cls_token_id": 3, "sep_token_id": 4, "local_attention": 16, "dim": 64, "n_layers": 2, "n_heads": 4}


def prompts(vocab: int = 320) -> list[list[int]]:
    """Prompts of several lengths, two of the same; each ends with a separator, and two have one within."""
    generator = torch.Generator().manual_seed(5)
    found = [torch.randint(10, vocab, (length,), generator=generator).tolist() for length in LENGTHS]
    for prompt in found:
        prompt[0], prompt[-1] = 3, 4
    found[0][12] = found[3][6] = 4
    return found


def drawn(kind: Any, model_type: str, **changed: Any) -> transformers.PreTrainedModel:
    """A model of `kind` with two layers and random weights that are not small."""
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, "num_hidden_layers": 2, **SPECIAL, **changed})
    model: transformers.PreTrainedModel = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.train(False)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * (0.1 if "norm" in name.lower() or name.endswith("bias") else 0.06))
    return model


def computed(folder: Path, chunk: int = 16) -> list[Tensor]:
    """Each prompt's values, all prompts side by side in chunks over a pool."""
    runner = Runner(folder, torch.float32)
    (stage,) = runner.stages
    texts, done, tables = prompts(runner.config.vocab_size), [0] * len(LENGTHS), list[list[int]]()
    for text in texts:
        tables.append([runner.free.pop() for _ in range(-(-len(text) // BLOCK))])
    found: dict[int, Tensor] = {}
    while len(found) < len(texts):
        work = [index for index, text in enumerate(texts) if done[index] < len(text)]
        parts = [texts[index][done[index] : done[index] + chunk] for index in work]
        packed = [array("i", part).tobytes() for part in parts]
        starts = [(part, done[index], tables[index]) for part, index in zip(packed, work, strict=True)]
        batch = PackedBatch.build(starts, BLOCK)
        hidden = stage.forward(batch.token_ids, batch, runner.pool)
        ends = []
        for row, (index, part) in enumerate(zip(work, parts, strict=True)):
            done[index] += len(part)
            if done[index] == len(texts[index]):
                ends.append((row, index))
        if ends:
            values = stage.pooled(hidden, batch, [row for row, _ in ends])
            found.update(zip((index for _, index in ends), values, strict=True))
    logits = stage.logits(hidden[:1])
    assert logits.shape == (1, runner.config.vocab_size)
    assert bool(torch.isfinite(logits).all())
    return [found[index] for index in range(len(texts))]


def expected(model: Any, *, types: bool = False) -> list[Any]:
    """What transformers says of each prompt alone."""
    outputs = []
    for prompt in prompts(model.config.vocab_size):
        given = {"input_ids": torch.tensor([prompt])}
        if types:
            first = prompt.index(4)
            given["token_type_ids"] = torch.tensor([[0] * (first + 1) + [1] * (len(prompt) - first - 1)])
        with torch.inference_mode():
            outputs.append(model(**given))
    return outputs


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=2e-5, rtol=1e-4)


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.parametrize("model_type", DECODERS)
def test_decoders_that_classify(model_type: str, tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    model = drawn(kind, model_type, num_labels=3, **DECODERS[model_type])
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.pooling is not None
    assert (config.pooling.task, config.pooling.whole, config.pooling.size(64)) == ("classify", False, 3)
    found = computed(tmp_path)
    assert_same(found, [output.logits[0] for output in expected(model)])
    assert found[0].std() > 1e-3


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("saved", ["base", "with head"])
def test_decoders_that_embed(model_type: str, saved: str, tmp_path: Path) -> None:
    """A class without a head, whose tensors have no `model.` in front, and one with a head."""
    model = drawn(transformers.AutoModelForCausalLM, model_type, **DECODERS[model_type])
    body: Any = model.base_model
    (model if saved == "with head" else body).save_pretrained(tmp_path)
    modules(tmp_path, "lasttoken")
    config = load_config(tmp_path)
    assert config.pooling is not None
    assert config.generates == (saved == "with head")
    assert not config.pooling.whole
    assert_same(computed(tmp_path), [unit(output.last_hidden_state[0, -1]) for output in expected(body)])
    (tmp_path / "modules.json").unlink()
    assert_same(computed(tmp_path), [unit(output.last_hidden_state[0, -1]) for output in expected(body)])


def test_a_generative_folder_without_the_name_in_front(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: its class is a decoder with a head, its tensors are the body's."""
    model = reference("qwen3", {**HEAD, "num_hidden_layers": 2, "tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    assert_same(computed(tmp_path), [unit(each.last_hidden_state[0, -1]) for each in expected(model.base_model)])


def test_a_reward_model(tmp_path: Path) -> None:
    """Qwen's: two products, with ReLU between."""
    model = drawn(transformers.AutoModelForCausalLM, "qwen2")
    model.save_pretrained(tmp_path)
    change(tmp_path / "config.json", architectures=["Qwen2ForRewardModel"])
    generator = torch.Generator().manual_seed(1)
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    for layer in (first, second):
        torch.nn.init.normal_(layer.weight, generator=generator)
    head = {f"score.{place}.{name}": weight.detach() for place, layer in ((0, first), (2, second))
            for name, weight in layer.named_parameters()}  # fmt: skip
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"} | head, file)
    rows = [output.last_hidden_state[0, -1] for output in expected(model.base_model)]
    with torch.inference_mode():
        assert_same(computed(tmp_path), [second(torch.relu(first(row))) for row in rows])


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_that_answers_yes_or_no(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Reranker's value: how much likelier the answer begins with yes than with no."""
    model = reference("qwen3", {**HEAD, "num_hidden_layers": 2, "tie_word_embeddings": tied})
    model.save_pretrained(tmp_path)
    words = {f"w{index}": index for index in range(320)} | {"no": 300, "yes": 200}
    del words["w300"], words["w200"]
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w5")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    change(
        tmp_path / "config.json", architectures=["Qwen3ForSequenceClassification"], classifier_from_token=["no", "yes"]
    )
    config = load_config(tmp_path)
    assert config.pooling is not None
    assert (config.pooling.labels, config.pooling.activation, config.generates) == (("yes",), "sigmoid", False)
    rows = [output.logits[0, -1] for output in expected(model)]
    assert_same(computed(tmp_path), [row[[200]] - row[[300]] for row in rows])
    change(tmp_path / "config.json", classifier_from_token=["no", "maybe"])
    with pytest.raises(UnsupportedModel, match="'maybe' is no token"):
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 2)
    change(tmp_path / "config.json", classifier_from_token=["yes"])
    with pytest.raises(UnsupportedModel, match="classifier_from_token"):
        load_config(tmp_path)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_encoders_that_classify(model_type: str, tmp_path: Path) -> None:
    """Also pairs, whose second text has another token type; no sequence is longer than the positions."""
    model = drawn(transformers.AutoModelForSequenceClassification, model_type, num_labels=2)
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert isinstance(load_stage(tmp_path, config, torch.float32, 0, 1), WholePromptStage)
    assert config.max_position_embeddings - 1 == (509 if "roberta" in model_type else 512)
    types = model_type in ("bert", "electra")
    found = computed(tmp_path)
    assert_same(found, [output.logits[0] for output in expected(model, types=types)])
    assert found[0].std() > 1e-3


@pytest.mark.parametrize(
    ("told", "types"),
    [
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"model_input_names": ["input_ids", "token_type_ids"], "tokenizer_class": "TokenizersBackend"}, True),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"tokenizer_class": "BertTokenizer"}, True),
    ],
)
def test_token_types_are_those_that_the_tokenizer_gives(
    told: Mapping[str, Any], *, types: bool, tmp_path: Path
) -> None:
    model = drawn(transformers.AutoModelForSequenceClassification, "bert", num_labels=2)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    assert_same(computed(tmp_path), [output.logits[0] for output in expected(model, types=types)])


def test_steps_of_an_engine(tmp_path: Path) -> None:
    """Two chunks of a prompt through what runs the steps of every model."""
    model = drawn(transformers.AutoModelForSequenceClassification, "bert", num_labels=2)
    model.save_pretrained(tmp_path)
    (prompt, *_), table = prompts(), (4, 1, 6)
    with stages(tmp_path, 1) as engine:
        engine.run(Step(1, (SequenceStep(ids(*prompt[:16]), 0, table),)))
        last = SequenceStep(ids(*prompt[16:]), 16, table, SampleSpec(SamplingParams(embedding=True)))
        done = engine.run(Step(2, (last,), layer_events=True))[-1]
    (values,) = done.embeddings.values()
    found = torch.frombuffer(bytearray(values), dtype=torch.float32)
    assert_same([found], [expected(model, types=True)[0].logits[0]])


@pytest.mark.parametrize("kind", ["cls", "mean", "max", "lasttoken"])
def test_encoders_that_embed(kind: str, tmp_path: Path) -> None:
    model = drawn(transformers.AutoModel, "bert")
    model.save_pretrained(tmp_path)
    modules(tmp_path, kind)
    states = [output.last_hidden_state[0] for output in expected(model, types=True)]
    pooled = {
        "cls": lambda s: s[0],
        "mean": lambda s: s.mean(0),
        "max": lambda s: s.amax(0),
        "lasttoken": lambda s: s[-1],
    }
    assert_same(computed(tmp_path), [unit(pooled[kind](state)) for state in states])
    if kind == "mean":
        (tmp_path / "modules.json").unlink()
        assert_same(computed(tmp_path), [unit(state.mean(0)) for state in states])


def test_dense_layers_of_sentence_transformers(tmp_path: Path) -> None:
    model = drawn(transformers.AutoModel, "modernbert")
    model.save_pretrained(tmp_path)
    dense = torch.nn.Linear(64, 24)
    (tmp_path / "2_Dense").mkdir()
    settings = {
        "in_features": 64,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    weights = {"linear.weight": dense.weight.detach(), "linear.bias": dense.bias.detach()}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    modules(tmp_path, "mean", "Dense")
    config = load_config(tmp_path)
    assert config.pooling is not None
    assert config.pooling.size(config.hidden_size) == 24
    states = [output.last_hidden_state[0] for output in expected(model)]
    with torch.inference_mode():
        assert_same(computed(tmp_path), [unit(torch.tanh(dense(state.mean(0)))) for state in states])
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense"):
        load_stage(tmp_path, config, torch.float32, 0, 1)


def test_a_decoder_that_is_pooled_over_all_tokens_is_computed_whole(tmp_path: Path) -> None:
    model = drawn(transformers.AutoModel, "qwen3", **HEAD)
    model.save_pretrained(tmp_path)
    modules(tmp_path, "mean")
    config = load_config(tmp_path)
    assert config.pooling is not None
    assert config.pooling.whole
    assert_same(computed(tmp_path), [unit(output.last_hidden_state[0].mean(0)) for output in expected(model)])


def test_token_ids_survive_every_element_type(tmp_path: Path) -> None:
    """The pool holds ids in place of KV, also those of a large vocabulary in bfloat16."""
    model = drawn(transformers.AutoModel, "bert", vocab_size=70_000, hidden_size=16)
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stage = load_stage(tmp_path, config, dtype, 0, 1)
        assert isinstance(stage, WholePromptStage)
        tokens = [69_999, 128, 255, 257, 16_511, 65_537]
        batch = PackedBatch.build([(array("i", tokens).tobytes(), 0, [1])], BLOCK)
        stage.forward(batch.token_ids, batch, torch.full((1, 2, 1, 2, BLOCK, 8), torch.nan, dtype=dtype))
        assert stage.prompt_tokens(batch, 0).tolist() == tokens


def test_types_of_tokens() -> None:
    assert token_types(torch.tensor([[3, 9, 4, 8, 8, 4], [3, 9, 9, 9, 9, 4]])).tolist() == [
        [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]
    ]  # fmt: skip


def test_heads_do_not_change_the_name_of_kv(tmp_path: Path) -> None:
    drawn(transformers.AutoModelForSequenceClassification, "qwen3", **HEAD).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config_hash(config) == config_hash(replace(config, pooling=None))


@pytest.mark.parametrize(
    ("changed", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"id2label": {"0": "relevance"}}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
    ],
)
def test_what_makes_scores_of_values(changed: Mapping[str, Any], activation: str, tmp_path: Path) -> None:
    drawn(transformers.AutoModelForSequenceClassification, "bert").save_pretrained(tmp_path)
    change(tmp_path / "config.json", **changed)
    config = load_config(tmp_path)
    assert config.pooling is not None
    assert config.pooling.activation == activation


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, "steps within a prompt"),
        ({"architectures": ["BertForRewardModel"]}, "no reward model of a known decoder"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changed: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    drawn(transformers.AutoModel, "bert").save_pretrained(tmp_path)
    change(tmp_path / "config.json", **changed)
    with pytest.raises(UnsupportedModel, match=words):
        load_config(tmp_path)


def test_other_modules_of_sentence_transformers_are_refused(tmp_path: Path) -> None:
    drawn(transformers.AutoModel, "bert").save_pretrained(tmp_path)
    modules(tmp_path, "mean", "LSTM")
    with pytest.raises(UnsupportedModel, match="LSTM"):
        load_config(tmp_path)
    modules(tmp_path, "mean_sqrt_len_tokens")
    with pytest.raises(UnsupportedModel, match="pooling_mode"):
        load_config(tmp_path)


def test_an_encoder_has_no_kv_to_quantise(tmp_path: Path) -> None:
    drawn(transformers.AutoModel, "bert").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="whole prompts"):
        engine_setup(PrefillConfig(conductor=("127.0.0.1:1",), model=str(tmp_path), kv_cache_dtype="int8"))


def change(file: Path, **changed: Any) -> None:
    """Change a file's settings."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def modules(folder: Path, kind: str, *others: str) -> None:
    """Write the files of sentence-transformers."""
    names = ["Transformer", "Pooling", *others, "Normalize"]
    places = ["", "1_Pooling", *(f"{index}_{name}" for index, name in enumerate([*others, "Normalize"], 2))]
    listed = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{name}"}
        for index, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    keys = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    chosen = {f"pooling_mode_{keys.get(kind, kind)}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **chosen}))
