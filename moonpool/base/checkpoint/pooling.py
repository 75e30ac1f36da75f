"""What a folder makes of a whole prompt: an embedding, or the values of a classifier, reranker or reward model.

The folder's `architectures` tell the head, and the files of sentence-transformers (`modules.json` and its folders) how
tokens become an embedding. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.fields import JsonFields, read_json
from moonpool.base.json_parts import parse_json

PoolingKind = Literal["last", "cls", "mean", "max"]
ScoreActivation = Literal["none", "sigmoid", "softmax"]

_CLASSIFIER, _REWARD = "ForSequenceClassification", "ForRewardModel"
_GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_MASKED = "ForMaskedLM"
_KINDS: Mapping[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_KIND_NAMES: Mapping[str, PoolingKind] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
_DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU")
WHOLE_PROMPT_TOKENS = 4096
"""Tokens of whole prompts of one length that are computed together, if one prompt is not longer."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A product behind pooling.

    Attributes:
        folder: the folder of the layer in the checkpoint, with `model.safetensors`.
        inputs: values in.
        outputs: values out.
        bias: whether a bias is added.
        activation: name of torch's module behind the product.
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a whole prompt becomes.

    Attributes:
        task: "embed": a vector of length 1; "classify": one raw value for each label.
        kind: which tokens' states count: the last one's, the first one's, the mean or the largest of all.
        whole: transformers' own code computes whole prompts, of which no KV is kept: encoders, and decoders whose
            attention or pooling sees the whole prompt.
        generates: the model answers with text, too.
        labels: names of the classifier's values, in order.
        activation: what makes scores of the values, unless a request says otherwise.
        hidden_head: a reward model's head has a layer before the last one.
        answers: two tokens' texts, "no" and "yes" for example, of which the one value is made: the second one's logit
            less the first one's.
        dense: products behind pooling, in order.
    """

    task: Literal["embed", "classify"]
    kind: PoolingKind
    whole: bool = False
    generates: bool = False
    labels: tuple[str, ...] = ()
    activation: ScoreActivation = "none"
    hidden_head: bool = False
    answers: tuple[str, ...] = ()
    dense: tuple[DenseLayer, ...] = ()

    def size(self, hidden_size: int) -> int:
        """Return the number of values, for states of `hidden_size` values."""
        if self.task == "classify":
            return len(self.labels)
        return self.dense[-1].outputs if self.dense else hidden_size


def decoder_of(architecture: str) -> str:
    """Return the decoder with a family whose layers an architecture has; "" if there is none."""
    ends = (_CLASSIFIER, _REWARD, "Model")
    base = next((architecture.removesuffix(end) for end in ends if architecture.endswith(end)), "")
    names = [f"{name}{end}" for name in (base, base.removesuffix("Text")) for end in ("ForCausalLM", "LMHeadModel")]
    return next((name for name in names if base and name in FAMILIES), "")


def folder_pooling(folder: Path, data: Mapping[str, Any]) -> Pooling | None:
    """Return what a folder with `config.json`'s `data` makes of prompts; None: a model that only answers with text.

    Raises:
        CheckpointError: a file of sentence-transformers is missing or malformed.
        UnsupportedModel: something that would change the values is not built; names the field.
    """
    declared = data.get("architectures")
    name = str(declared[0]) if isinstance(declared, list) and len(declared) == 1 else ""
    sentences = (folder / "modules.json").exists()
    if name.endswith((_CLASSIFIER, _REWARD)):
        return _classifier(name, data)
    if name.endswith("ForProcessRewardModel"):
        raise UnsupportedModel("architectures", f"{name} gives values for steps within a prompt, which is not built")
    generative = name.endswith(_GENERATIVE)
    if re.search("For[A-Z]", name) and not generative and not name.endswith(_MASKED):
        return None  # another head
    if not sentences and (generative or not name.endswith("Model")):
        return None
    if not generative and not name.endswith(("Model", _MASKED)):
        return None
    decoder = name if generative else decoder_of(name)
    kind: PoolingKind = "last" if decoder else "mean"
    dense: tuple[DenseLayer, ...] = ()
    if sentences:
        kind, dense = _modules(folder, kind)
    whole = not decoder or kind != "last" or _sees_all(data)
    return Pooling("embed", kind, whole=whole, generates=generative and not whole, dense=dense)


def _classifier(name: str, data: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a classifier, reranker or reward model."""
    decoder = decoder_of(name)
    whole = not decoder or _sees_all(data)
    if name.endswith(_REWARD):
        if whole:
            raise UnsupportedModel("architectures", f"{name} is no reward model of a known decoder")
        return Pooling("classify", "last", labels=("reward",), hidden_head=True)
    if (answers := data.get("classifier_from_token")) is not None:
        if whole or not isinstance(answers, list) or len(answers) != 2 or not all(map(_is_text, answers)):
            raise UnsupportedModel("classifier_from_token", f"{answers!r} are not two texts for a known decoder")
        return Pooling("classify", "last", labels=(answers[1],), activation="sigmoid", answers=tuple(answers))
    labels = _labels(data)
    return Pooling("classify", "last" if decoder else "cls", whole, labels=labels, activation=_activation(data, labels))


def _sees_all(data: Mapping[str, Any]) -> bool:
    """Whether a decoder's tokens attend to later ones."""
    return data.get("use_bidirectional_attention") is True or data.get("is_causal") is False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _labels(data: Mapping[str, Any]) -> tuple[str, ...]:
    named = data.get("id2label")
    if isinstance(named, Mapping) and named:
        try:
            return tuple(str(named[key]) for key in sorted(named, key=int))
        except ValueError:
            raise CheckpointError("config.json: id2label must have numbers as keys") from None
    count = JsonFields(data, "config.json").positive("num_labels", 2)
    return tuple(f"LABEL_{index}" for index in range(count))


def _activation(data: Mapping[str, Any], labels: tuple[str, ...]) -> ScoreActivation:
    """Return what makes scores of values: as sentence-transformers says, else by the kind of problem, as in vLLM."""
    settings = data.get("sentence_transformers")
    told = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    match str(told or data.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]:
        case "Identity":
            return "none"
        case "Sigmoid":
            return "sigmoid"
    match data.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
        case "single_label_classification" if len(labels) > 1:
            return "softmax"
    return "softmax" if len(labels) > 1 else "sigmoid"


def _modules(folder: Path, default: PoolingKind) -> tuple[PoolingKind, tuple[DenseLayer, ...]]:
    """Return the pooling and the dense layers that `modules.json` names."""
    kind, dense = default, list[DenseLayer]()
    normalised = False
    for module in _module_list(folder):
        name, place = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if name in ("Dense", "Pooling") and Path(place).name != place:
            raise CheckpointError(f"{folder}: modules.json: {place!r} is no folder of the checkpoint")
        match name:
            case "Transformer":
                continue
            case "Pooling":
                kind = _pooling_kind(JsonFields(read_json(folder / place / "config.json"), f"{place}/config.json"))
            case "Dense":
                if normalised:
                    raise UnsupportedModel("modules.json", "Dense behind Normalize is not built")
                dense.append(_dense(place, JsonFields(read_json(folder / place / "config.json"), place)))
            case "Normalize":
                normalised = True
            case _:
                raise UnsupportedModel("modules.json", f"{name!r} is none of Transformer, Pooling, Dense, Normalize")
    return kind, tuple(dense)


def _module_list(folder: Path) -> list[Mapping[str, Any]]:
    try:
        modules = parse_json((folder / "modules.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: modules.json cannot be read: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{folder}: modules.json must be a list of objects")
    return modules


def _pooling_kind(fields: JsonFields) -> PoolingKind:
    """Return the one kind that a `Pooling` module's settings name."""
    told = fields.get("pooling_mode")
    if isinstance(told, str):
        if told not in _KIND_NAMES:
            raise UnsupportedModel("pooling_mode", f"{told!r} is none of {', '.join(_KIND_NAMES)}")
        return _KIND_NAMES[told]
    chosen = [name for name in fields.all() if name.startswith("pooling_mode_") and fields.get(name) is True]
    if len(chosen) != 1 or chosen[0] not in _KINDS:
        raise UnsupportedModel("pooling_mode", f"{', '.join(chosen) or 'none'}, not one of {', '.join(_KINDS)}")
    return _KINDS[chosen[0]]


def _dense(place: str, fields: JsonFields) -> DenseLayer:
    activation = str(fields.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _DENSE_ACTIVATIONS:
        raise UnsupportedModel("activation_function", f"{activation!r} is none of {', '.join(_DENSE_ACTIVATIONS)}")
    sizes = fields.positive("in_features"), fields.positive("out_features")
    return DenseLayer(place, *sizes, bias=fields.flag("bias", True), activation=activation)
