"""A model family's contract: what checkpoints say, and what their tensors are called. Torch-free.

A family is a `ModelFamily` in a file beside this file; docs/extend/model_family.md lists the steps. Checkpoint readers
and the weight loader tell families apart only by the description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.rope import read_rope
from moonpool.base.families.spec import Activation, AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, NormSpec

_OLD_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq")
"""Keys of rotary embeddings in the spelling before transformers 5."""


def class_sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int) -> Mapping[str, int]:
    """Return `ModelFamily.sizes`."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


COMMON_DEFAULTS: Mapping[str, Any] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}
_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_ACTIVATIONS: Mapping[object, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of tensors in a Hugging Face checkpoint; of a layer's tensors between `layer` and .weight or .bias.

    If several projections are one tensor in the checkpoint, `qkv` or `gate_up` names that tensor.
    """

    embedding: str = "model.embed_tokens.weight"
    positions: str = ""
    norm: str = "model.norm"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{index}."
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    qkv_order: Literal["stacked", "grouped"] = "stacked"
    """Row order in `qkv`: all of q, then k, then v; or for each KV head the head's queries, key and value."""
    inputs_first: bool = False
    """Whether weights are stored [inputs, outputs]. GGUF files have outputs first, and all of q, k and v in turn."""
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    scalar: str = "layer_scalar"
    per_layer_embedding: str = "model.embed_tokens_per_layer.weight"
    """Tokens' embeddings for all layers, side by side; and what projects the usual embeddings, and that norm."""
    per_layer_input: str = "model.per_layer_model_projection"
    per_layer_input_norm: str = "model.per_layer_projection_norm"
    per_layer_gate: str = "per_layer_input_gate"
    per_layer_output: str = "per_layer_projection"
    per_layer_norm: str = "post_per_layer_input_norm"
    sinks: str = "self_attn.sinks"
    head_gate: str = "self_attn.g_proj"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    k_b: str = "self_attn.k_b_proj"
    """GGUF files have `kv_b` as two tensors: for keys, with the inputs first in each head, and for values."""
    v_b: str = "self_attn.v_b_proj"
    index_q: str = "self_attn.indexer.wq_b"
    index_k: str = "self_attn.indexer.wk"
    index_k_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"
    recurrent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of layers with a recurrent state: names by field of `moonpool.engine.models.recurrent.RecurrentWeights`. Tensors
    of one field are stacked. Names of "decay", "step_bias" and "skip" are whole."""
    interleaved: bool = False
    """Whether the rows of "inputs" lie by key head: its query, key, values and gates; its b and a ("gated_delta").
    GGUF files have the first of the two by kind, as the tensors "split" of `recurrent`."""
    attention_out_norm: str = "post_attention_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_out_norm: str = "post_feedforward_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_up: str = ""
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    dense_out_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    correction_row: bool = False
    """Whether the correction is stored as a row [1, count]."""
    expert: str = "mlp.experts.{expert}."
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    experts_gate_up: str = ""
    """All experts' gates and ups as one tensor, by the tensor's whole name; "": each expert has separate tensors."""
    experts_down: str = ""
    experts_inputs_first: bool = False
    """Whether these tensors are stored [count, inputs, outputs]."""
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate_up: str = ""
    """Gates and ups of the shared network where they are one tensor."""
    shared_weight: str = "mlp.shared_expert_gate"
    to_experts: str = "mlp.fc1_latent_proj"
    """What projects to `ExpertsSpec.latent_width`, and back."""
    from_experts: str = "mlp.fc2_latent_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufNames:
    """GGUF's names for the family and the tensors."""

    architecture: str
    """Value of `general.architecture`."""
    other_architectures: tuple[str, ...] = ()
    """Further values, for files that equal these but for the value: the text parts of models with pictures."""
    paired_rows: bool = False
    """Whether the converter moved rows of q and k that RoPE turns together beside one another. llama.cpp's converter
    does so for Llama and derived families; Hugging Face has them half a head apart.
    """
    keys: Mapping[str, str] = field(default_factory=dict)
    """Further keys in config.json, each with GGUF's key without the architecture before the key."""
    complete: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda _: {}
    """From the keys found so far to those that files leave out."""
    whole_norms: bool = False
    """Whether the converter added the family's offset to the weights of norms."""
    outer: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "embedding",
            "position_embd": "positions",
            "output_norm": "norm",
            "output": "head",
        }
    )
    """Field of `TensorNames` by GGUF's name, for tensors outside layers."""
    layer: Mapping[str, str] = field(
        default_factory=lambda: {
            "attn_norm": "attention_norm",
            "attn_norm_2": "feed_forward_norm",
            "attn_qkv": "qkv",
            "attn_q": "q",
            "attn_k": "k",
            "attn_v": "v",
            "attn_q_norm": "q_norm",
            "attn_k_norm": "k_norm",
            "attn_output": "output",
            "post_attention_norm": "attention_out_norm",
            "ffn_norm": "feed_forward_norm",
            "post_ffw_norm": "feed_forward_out_norm",
            "ffn_gate": "gate",
            "ffn_up": "up",
            "ffn_down": "down",
            "ffn_gate_inp": "router",
            "ffn_gate_exps": "expert_gate",
            "ffn_up_exps": "expert_up",
            "ffn_down_exps": "expert_down",
            "ffn_gate_inp_shexp": "shared_weight",
            "ffn_gate_shexp": "shared_gate",
            "ffn_up_shexp": "shared_up",
            "ffn_down_shexp": "shared_down",
            "attn_q_a": "q_a",
            "attn_q_a_norm": "q_a_norm",
            "attn_q_b": "q_b",
            "attn_kv_a_mqa": "kv_a",
            "attn_kv_a_norm": "kv_a_norm",
            "attn_kv_b": "kv_b",
            "attn_k_b": "k_b",
            "attn_v_b": "v_b",
            "indexer.attn_q_b": "index_q",
            "indexer.attn_k": "index_k",
            "indexer.k_norm": "index_k_norm",
            "indexer.proj": "index_weights",
            "attn_sinks": "sinks",
            "exp_probs_b": "correction",
        }
    )
    """Field of `TensorNames` by GGUF's name, for a layer's tensors; experts are one tensor there."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """What differs from `layer` in this architecture."""
    recurrent: Mapping[str, str] = field(default_factory=dict)
    """Name in `TensorNames.recurrent` by GGUF's name. If KV heads are listed, layers with none are the recurrent ones.
    """
    in_turn: bool = False
    """Whether the converter moved the heads of values so that `RecurrentSpec.in_turn` holds."""
    further_layers: str = ""
    """Key for the number of layers that only drafting uses, which the files count among their layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One architecture."""

    architecture: str
    """Name in `architectures` of config.json."""
    model_type: str
    """Name in `model_type` of config.json."""
    decoder: Callable[[JsonFields], DecoderSpec]
    """Builds the layers from config.json; absent keys have their `defaults`."""
    defaults: Mapping[str, Any]
    """Values for absent keys: defaults of transformers' configuration class that differ from `COMMON_DEFAULTS`."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of transformers' configuration class, which text parts of models with further parts may leave out."""
    names: TensorNames = TensorNames()
    gguf: GgufNames | None = None
    """None: no GGUF file is of this family."""
    other_architectures: tuple[str, ...] = ()
    """Further names in `architectures` for checkpoints that equal this family to the last tensor."""
    other_model_types: tuple[str, ...] = ()
    """Further names in `model_type` for the same, among them those of text parts of models with further parts."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensor names that some of the family's checkpoints have in place of others."""
    other: bool = False
    """Whether transformers' own modelling code computes the model (`moonpool.base.families.other`)."""
    other_keys: Mapping[str, str] = field(default_factory=dict)
    """The family's own key names, by the common names."""

    def fields(self, data: Mapping[str, Any], source: str) -> JsonFields:
        """Return config.json's fields under their common names, absent ones with their defaults."""
        defaults = {**COMMON_DEFAULTS, **self.defaults}
        if not data.keys().isdisjoint(_OLD_ROPE):
            defaults.pop("rope_parameters", None)
        given = {**defaults, **data}
        return JsonFields(
            {**given, **{ours: given[theirs] for ours, theirs in self.other_keys.items() if theirs in given}}, source
        )


def activation(fields: JsonFields, key: str = "hidden_act") -> Activation:
    """Return the activation that config.json names.

    Raises:
        UnsupportedModel: the activation is not built; names the key.
    """
    name = fields.get(key)
    name = "silu" if name is None else name
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(key, f"activation {name!r} is none of {', '.join(map(str, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def llama_decoder(fields: JsonFields, *, rope_kind: str | None = None) -> DecoderSpec:
    """Return Llama's decoder from the keys that most families share; families change what differs.

    `rope_kind`: for layers whose RoPE is the first table, if RoPE differs between kinds of layers.
    """
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    size = fields.positive("head_dim", hidden // heads, null=hidden // heads)
    bias = fields.flag("attention_bias", False)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=fields.positive("num_key_value_heads", heads, null=heads),
        head_dim=size,
        scale=size**-0.5,
        qkv_bias=bias,
        output_bias=bias,
    )
    inner = FeedForwardSpec(
        fields.positive("intermediate_size"), activation(fields), bias=fields.flag("mlp_bias", False)
    )
    norm = NormSpec(eps=fields.number("rms_norm_eps"))
    layers = fields.positive("num_hidden_layers")
    return DecoderSpec((LayerSpec(attention, inner, norm),) * layers, (read_rope(fields, size, kind=rope_kind),), norm)


def layer_kinds(
    fields: JsonFields,
    layers: int,
    default: Sequence[str],
    known: Sequence[str] = _ATTENTION_KINDS,
    key: str = "layer_types",
) -> Sequence[str]:
    """Return each layer's kind from `key`, `default` where the key is absent.

    Raises:
        CheckpointError: not a list with as many kinds as layers.
    """
    kinds = fields.get(key)
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise CheckpointError(f"{fields.source}: {key} must be a list of {layers} kinds, not {kinds!r}")
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModel(key, f"{kind!r} is none of {', '.join(known)}")
    return [str(kind) for kind in kinds[:layers]]


def own_keys(keys: Mapping[str, Any], other_keys: Mapping[str, str]) -> dict[str, Any]:
    """Return `keys`, by common names, under the names that a family has for them (`ModelFamily.other_keys`)."""
    return {other_keys.get(ours, ours): value for ours, value in keys.items()}


def kinds_by_kv_heads(found: Mapping[str, Any], recurrent: str) -> list[str] | None:
    """Return the layers' kinds of a GGUF file that lists KV heads: `recurrent` where there are none; None: no list."""
    heads = found.get("listed_kv_heads")
    return ["full_attention" if count else recurrent for count in heads] if isinstance(heads, list) else None


def windowed(fields: JsonFields, decoder: DecoderSpec, kinds: Sequence[str]) -> DecoderSpec:
    """Return `decoder` with `sliding_window` on layers of the kind "sliding_attention".

    A window that no sequence can outgrow changes no result and is left out.
    """
    if fields.get("sliding_window") is None:
        return decoder
    window = fields.positive("sliding_window")
    if window >= fields.positive("max_position_embeddings"):
        return decoder
    return decoder.each(
        lambda index, layer: layer.with_attention(window=window) if kinds[index] == "sliding_attention" else layer
    )
