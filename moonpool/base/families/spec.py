"""What a decoder-only transformer computes, layer by layer, as values: one `LayerSpec` per kind of layer. Torch-free.

Families (`moonpool.base.families`) build these values from config.json. `moonpool.engine.models` interprets them: the
torch path interprets all, the native step those that `DecoderSpec.not_native` lets through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
FALLBACK = "transformers' own modelling code"
"""Why torch computes the layers of an architecture that no family describes."""
NATIVE_HEAD_DIM = 256
"""`MAX_HEAD_DIM` of `kernels/engine/pool.h`."""
GPU_HEAD_DIM = 512
"""`MAX_HEAD_DIM` of `moonpool.engine.kernels.triton`."""
GPU_LATENT = 512, 128
"""`MAX_VALUE_DIM` and `MAX_REST` of `moonpool.engine.kernels.triton`."""
NATIVE_CHOSEN = 64
"""`MAX_CHOSEN` of `kernels/engine/experts.h`."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are changed for a longer context.

    `kind` is one of:

    - "linear": all frequencies are divided by `factor`.
    - "llama3": low frequencies are divided by `factor`, high ones kept, smooth between; the bounds of the two regions
      are `low_freq_factor` and `high_freq_factor`.
    - "yarn": the same idea over `ramp`, the pairs of elements between which division sets in (Peng et al. 2023).
    - "divisors": each frequency is divided by a separate number in `divisors`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] = ()
    ramp: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary position embedding table (Su et al. 2021).

    `width`: a head's leading elements that are rotated; the others stay as they are. `paired`: the checkpoint has
    elements that turn together beside one another; the loader moves them half a head apart. `magnitude`: cosine and
    sine are multiplied with this factor (YaRN's attention factor). `by_length`: a query at position p is multiplied
    with 1 + by_length[0] * log(1 + (p + length_from) // by_length[1]).
    """

    theta: float
    width: int
    scaling: RopeScaling | None = None
    paired: bool = False
    magnitude: float = 1.0
    by_length: tuple[float, int] | None = None
    length_from: int = 0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalisation over the last dimension.

    `kind`: "rms" (Zhang and Sennrich 2019) or "layer" (with the mean taken off). `offset` is added to the stored
    weight. `bias`: a bias is stored too. `weighted`: a weight is stored. `wide`: the weight multiplies before the
    result is rounded to the weights' type, instead of after.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    bias: bool = False
    weighted: bool = True
    wide: bool = False

    @property
    def plain(self) -> bool:
        """Whether this is Llama's norm, which native kernels compute."""
        return self == NormSpec(eps=self.eps)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): all heads' keys and values come from one latent vector.

    The pool holds the latent vector and the key's rotated part, as one head. Queries are taken into the latent space
    ("absorbed"), so that attention reads the latent vectors alone.
    """

    kv_rank: int
    """Width of the latent vector."""
    q_rank: int | None
    """Width of the queries' latent vector; None: queries are projected at once."""
    rope_width: int
    """Rotated elements of queries and keys."""
    key_width: int
    """Other elements of a head's queries and keys."""
    value_width: int
    """Elements of a head's values."""
    norm_eps: float


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """What chooses the keys that a query attends to (DeepSeek V3.2, 2025: the lightning indexer).

    A key counts by the weighted sum over the indexer's heads of relu(query * key): heads, head size, scale and rotation
    are those of the layer's `AttentionSpec`. The pool holds the indexer's keys as one head with one plane.
    """

    topk: int
    """Keys that a query attends to; sequences that are no longer see all."""
    q_rank: int
    """Width of the queries' latent vector, which the attention behind reads too."""
    q_norm_eps: float
    key_norm_eps: float


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of keys and values in the pool; with `latent`, kv_rank + rope_width."""
    scale: float
    """Factor on scores."""
    rope: int | None = 0
    """Index in the model's rotary embedding tables; None: no position embeddings."""
    window: int | None = None
    """Tokens that a query sees, the query's own included; None: all."""
    chunked: bool = False
    """Whether the window begins anew every `window` tokens: a query sees its own chunk's earlier tokens (Llama 4)."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap)."""
    sinks: bool = False
    """Each head has a stored score that takes part in the softmax and has no value."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    """Norm of queries and keys."""
    qk_norm_over: Literal["head", "heads", "all"] = "head"
    """Norm scope: each head with one weight for all heads, each head with a separate weight, or all heads as one
    vector.
    """
    qk_norm_last: bool = False
    """Norm after rotation instead of before."""
    value_norm: bool = False
    """Each head's values have the norm of `qk_norm`, without a weight."""
    values_of_keys: bool = False
    """Values are the keys before norm and rotation: they have no projection."""
    latent: LatentSpec | None = None
    kv_of: int | None = None
    """Index of the layer whose keys and values attention reads; the layer has none of its own."""
    output_gate: bool = False
    """Attention's result is multiplied with the sigmoid of a gate, which lies behind each head's query."""
    head_gate: bool = False
    """Each head's result is multiplied with the sigmoid of one number, which has a projection of its own."""
    value_width: int = 0
    """Elements of a head's values, fewer than `head_dim`: the pool has zeros behind them; 0: `head_dim`."""
    value_factor: float = 0.0
    """Factor on values; 0: none."""
    index_topk: int = 0
    """Keys that a query sees, those of the last indexer before (`LayerSpec.indexer`); 0: all."""


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A part with a recurrent state of fixed size, in place of attention.

    `kind` is one of:

    - "short_conv": gate * conv(gate * input) over the last `conv` tokens (LFM2).
    - "mamba2": a state space with one decay a head (Dao and Gu 2024).
    - "gated_delta": the delta rule with one decay a head (Yang et al. 2024).
    - "kimi_delta": the delta rule with one decay an element of the keys (Kimi Linear, 2025).
    - "lightning": linear attention with a fixed decay a head, and rotated queries and keys (Qin et al. 2024). The RoPE
      table is that of the layer's `AttentionSpec`.

    All kinds but the first have a state [heads, key_dim, value_dim]. All but the last convolve queries, keys and values
    first, and keep the convolution's last inputs, too.
    """

    kind: Literal["short_conv", "mamba2", "gated_delta", "kimi_delta", "lightning"]
    conv: int
    """Tokens that the convolution sees, the present one included; 1: there is none."""
    heads: int = 0
    """Of values; 0: there is no state beside the convolution's."""
    key_heads: int = 0
    """Of keys and queries; each serves heads / key_heads heads of values, consecutive ones unless `in_turn`."""
    key_dim: int = 0
    value_dim: int = 0
    width: int = 0
    """Channels of "short_conv"; width of the gates' inner vectors of "kimi_delta"."""
    conv_bias: bool = False
    bias: bool = False
    """Whether projections have biases."""
    norm_eps: float = 1e-6
    """Of the norm before the last projection."""
    gate_first: bool = False
    """Whether that norm's input is gated, instead of its result."""
    in_turn: bool = False
    """Whether heads of keys serve heads of values in turn: value head h has key head h % key_heads."""
    input_factors: tuple[float, ...] = ()
    """Factors on what the projection gives, of "mamba2": gates, values, keys, queries, steps; (): none."""
    output_factor: float = 0.0
    """Factor on the result; 0: none."""
    without_norm: bool = False
    """Whether the result of "mamba2" is gated and has no norm."""
    decay_stored: bool = False
    """Whether the checkpoint has the decay itself, instead of the logarithm of its negative."""
    decays: tuple[float, ...] = ()
    """Of each head, logarithms ("lightning")."""
    head_norms: bool = False
    """Whether each head's queries and keys have a norm, before rotation ("lightning")."""
    norm_groups: int = 0
    """Parts of the result that are normed by themselves, with a weight for all elements ("lightning")."""

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        if self.kind == "short_conv":
            return self.width
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of a sequence's state, those of the convolution first."""
        return self.channels * (self.conv - 1) + self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of one feed-forward network."""

    count: int
    chosen: int
    inner: int
    """Width inside an expert."""
    scores: Literal["softmax", "sigmoid", "softmax_chosen"]
    """How the router's outputs become weights; "softmax_chosen": softmax over those of the chosen experts."""
    normalised: bool = False
    """Whether the chosen weights are divided by their sum."""
    least_sum: float = 0.0
    """The divisor is at least this number."""
    factor: float = 1.0
    """Factor on the chosen weights."""
    correction: bool = False
    """A stored bias is added to the scores by which experts are chosen, but not to their weights."""
    groups: int = 1
    """Experts are in so many groups, of which `groups_chosen` are looked at."""
    groups_chosen: int = 1
    group_top: int = 2
    """A group counts by the sum over its `group_top` highest scores."""
    router_bias: bool = False
    bias: bool = False
    """Whether the experts' projections have biases."""
    shared_inner: int = 0
    """Width of a network that all tokens pass beside the chosen experts; 0: there is none."""
    weighted_inputs: bool = False
    """Whether the weights multiply the experts' inputs instead of their outputs."""
    shared_gate: bool = False
    """Whether that network's output is weighted by a sigmoid of a stored projection."""
    shared_silu_limit: float = 0.0
    """`FeedForwardSpec.silu_limit` of the network beside the experts."""
    latent_width: int = 0
    """Width to which the experts' input is projected, and from which their sum is projected back; 0: as the layer."""
    beside: bool = False
    """Whether they stand beside the layer's dense network, each with norms (Gemma 4): they read the sum before the
    feed-forward part, the router behind a norm without weight and times a stored factor of each element, divided by
    sqrt(hidden). Each expert's weight has a stored factor.
    """


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """One layer's feed-forward part: down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    inner: int
    """Width inside; 0: the layer has no such part."""
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    experts: ExpertsSpec | None = None
    limit: float = 7.0
    """For "clamped_swiglu" (gpt-oss): gates are at most this number, ups within this number on both sides."""
    alpha: float = 1.702
    """Of "clamped_swiglu": (up + 1) * gate * sigmoid(alpha * gate)."""
    silu_limit: float = 0.0
    """Gates behind the activation are at most this number, ups within this number on both sides; 0: no limit."""
    gate_factor: float = 0.0
    """Factor on gates before the activation; 0: none."""
    output_factor: float = 0.0
    """Factor on the result; 0: none."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: norms, attention, feed-forward part, residual sums.

    Norms may stand before either part (`attention_norm`, `feed_forward_norm`) and behind either part
    (`attention_out_norm`, `feed_forward_out_norm`). `parallel`: both parts read the layer's input, the feed-forward
    part through `feed_forward_norm` or, without one, through `attention_norm`.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    """Kind of all the layer's norms except the query and key norms."""
    attention_norm: bool = True
    attention_out_norm: bool = False
    feed_forward_norm: bool = True
    feed_forward_out_norm: bool = False
    parallel: bool = False
    residual_factor: float = 1.0
    """Factor on each part's addition."""
    scalar: bool = False
    """The layer's result is multiplied with a stored number."""
    per_layer: int = 0
    """Width of a token's embedding for this layer alone, which is gated by the layer's result and added (Gemma 4); 0:
    there is none.
    """
    recurrent: RecurrentSpec | None = None
    """What stands in place of attention, of which only the shape of other layers' KV counts then."""
    indexer: IndexerSpec | None = None
    """What stands in place of attention and has no result but the keys that the attention behind sees."""
    beside: bool = False
    """Whether attention reads what the part of the layer before reads, instead of that layer's result (Falcon-H1)."""
    stored_at: tuple[int, int] | None = None
    """Indices in the checkpoint of the layers with the part over tokens and with the feed-forward part; None: both are
    the layer's own.
    """

    def with_attention(self, **changes: Any) -> LayerSpec:
        """Return this layer with some attention fields replaced."""
        return replace(self, attention=replace(self.attention, **changes))

    def with_feed_forward(self, **changes: Any) -> LayerSpec:
        """Return this layer with some feed-forward fields replaced."""
        return replace(self, feed_forward=replace(self.feed_forward, **changes))

    @property
    def not_plain(self) -> str:
        """What Llama's layer does not have, in a word or two; "" if this layer is of Llama's kind."""
        attention, inner = self.attention, self.feed_forward
        heads = attention.qk_norm is None or (
            attention.qk_norm.plain and attention.qk_norm.eps == self.norm.eps and attention.qk_norm_over == "head"
        )
        places = (True, False, True, False)
        found = (self.attention_norm, self.attention_out_norm, self.feed_forward_norm, self.feed_forward_out_norm)
        reasons = (
            ("a recurrent state", self.recurrent is not None),
            ("an indexer of keys", self.indexer is not None),
            ("no feed-forward part", not inner.inner),
            ("attention beside the layer before", self.beside),
            ("values with a factor or another width", bool(attention.value_width or attention.value_factor)),
            ("a factor on gates or results", bool(inner.gate_factor or inner.output_factor)),
            ("another norm", not self.norm.plain or found != places),
            ("latent attention", attention.latent is not None),
            ("a sliding window", attention.window is not None),
            ("a soft cap", attention.soft_cap is not None),
            ("attention sinks", attention.sinks),
            ("a gate of attention's result", attention.output_gate or attention.head_gate),
            ("a limit of gates", bool(inner.silu_limit or (inner.experts and inner.experts.shared_silu_limit))),
            ("another norm of queries and keys", not heads or attention.qk_norm_last),
            ("a norm of values", attention.value_norm or attention.values_of_keys),
            ("a factor on the layer's result", self.scalar),
            ("embeddings for each layer", bool(self.per_layer)),
            ("no rotary embeddings", attention.rope is None),
            ("another activation", inner.activation != "silu" or not inner.gated),
            ("parallel parts", self.parallel),
            ("a residual factor", self.residual_factor != 1.0),
        )
        return next((word for word, found in reasons if found), "")


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """All layers, and what stands before and behind them."""

    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    final_norm: NormSpec
    embedding_factor: float = 1.0
    """Factor on embeddings, in the weights' type."""
    logits_factor: float = 1.0
    """Factor on logits."""
    logits_soft_cap: float | None = None
    """Logits become soft_cap * tanh(logits / soft_cap)."""
    head_bias: bool = False
    learnt_positions: int = 0
    """Rows in a stored table that is added to the embeddings by position, less the first `positions_from` rows; 0:
    none.
    """
    positions_from: int = 0
    tail: tuple[LayerSpec, ...] = ()
    """Layers behind the others that read keys and values of these (`AttentionSpec.kv_of`): they run with the last one,
    and KV has no layer for them.
    """
    per_layer_rows: int = 0
    """Rows in the stored table of embeddings for each layer."""
    whole_pictures: bool = False
    """Whether the tokens of a picture attend to all tokens of the picture, within a layer's window."""
    other: str = ""
    """For an architecture that transformers' own modelling code computes, a digest of config.json; layers then say the
    shape of KV alone.
    """

    @property
    def every(self) -> tuple[LayerSpec, ...]:
        """All layers, with those of the tail."""
        return self.layers + self.tail

    @property
    def recurrent(self) -> bool:
        """Whether some layers have a recurrent state."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def stored_layers(self) -> int:
        """Layers of the checkpoint."""
        return 1 + max(max(layer.stored_at or (index,)) for index, layer in enumerate(self.every))

    @property
    def joined(self) -> frozenset[int]:
        """The layers that read what a layer before them computed beside its result: no stage begins with one."""
        return frozenset(index for index, layer in enumerate(self.layers) if layer.beside or layer.attention.index_topk)

    @property
    def whole_layer(self) -> int | None:
        """The layer whose KV is kept for all tokens though the layer has a window; None if another layer's is kept.

        Blocks that lack the KV behind windows are found by the KV that they have.
        """
        windows = [layer.recurrent is None and layer.attention.window is not None for layer in self.layers]
        kept = any(layer.recurrent is None and layer.attention.window is None for layer in self.layers)
        return None if kept or not any(windows) else windows.index(True)

    def each(self, change: Callable[[int, LayerSpec], LayerSpec]) -> DecoderSpec:
        """Return this decoder with `change(index, layer)` in place of each layer."""
        return replace(self, layers=tuple(change(index, layer) for index, layer in enumerate(self.layers)))

    def not_native(self, layer: int) -> str:
        """Why the native step does not compute a layer, in a few words; "" if it does."""
        spec = self.layers[layer]
        attention, experts = spec.attention, spec.feed_forward.experts
        reasons = (
            (
                f"heads of {attention.head_dim} elements, no multiple of 16 up to {NATIVE_HEAD_DIM}",
                attention.head_dim % 16 or attention.head_dim > NATIVE_HEAD_DIM,
            ),
            ("experts beside a dense network", experts is not None and experts.beside),
            ("experts with weighted inputs", experts is not None and experts.weighted_inputs),
            ("experts of another width", experts is not None and bool(experts.latent_width)),
            ("too many experts for a row", experts is not None and experts.chosen > NATIVE_CHOSEN),
        )
        return self._not_plain_layer(spec) or next((word for word, found in reasons if found), "")

    @property
    def not_captured(self) -> str:
        """Why a decode step cannot be a graph of a device, in a few words; "" if it can.

        These layers look at a device's tensors between launches.
        """
        reasons = (
            (FALLBACK, bool(self.other)),
            (
                f"latent vectors of more than {GPU_LATENT[0]} and {GPU_LATENT[1]} elements",
                any(
                    not _latent_on_gpu(layer.attention.latent)
                    for layer in self.every
                    if layer.attention.latent is not None
                ),
            ),
            (
                f"heads of more than {GPU_HEAD_DIM} elements",
                any(layer.attention.head_dim > GPU_HEAD_DIM for layer in self.every if layer.attention.latent is None),
            ),
        )
        return next((word for word, found in reasons if found), "")

    @property
    def not_plain(self) -> str:
        """Why the layers are not all alike and of Llama's kind; "" if they are."""
        if found := next(filter(None, map(self._not_plain_layer, self.layers)), ""):
            return found
        if any(layer.feed_forward.experts is not None for layer in self.layers):
            return "experts"
        return "layers of several kinds" if len(set(self.layers)) > 1 else ""

    def _not_plain_layer(self, layer: LayerSpec) -> str:
        if self.other:
            return FALLBACK
        if layer.not_plain:
            return layer.not_plain
        assert layer.attention.rope is not None
        rope = self.ropes[layer.attention.rope]
        partial = rope.width != layer.attention.head_dim or rope.by_length is not None
        return "rotary embeddings of a part of each head" if partial else ""


def _latent_on_gpu(latent: LatentSpec) -> bool:
    return latent.kv_rank <= GPU_LATENT[0] and 0 < latent.rope_width <= GPU_LATENT[1]


def described_ways(reasons: Sequence[str], first: int = 0) -> str:
    """Return which way layers compute, for people.

    Args:
        reasons: why each layer is not computed by the native step; "": the layer is.
        first: the first one's index in the model.
    """
    if not any(reasons):
        return "all layers native"
    ways = dict.fromkeys(sorted(reasons))
    parts = []
    for why in ways:
        numbers = [first + index for index, reason in enumerate(reasons) if reason == why]
        which = "all layers" if len(ways) == 1 else f"layers {_ranges(numbers)}"
        way = "fallback" if why == FALLBACK else "torch"
        parts.append(f"{which} {way} ({why})" if why else f"{which} native")
    return "; ".join(parts)


def _ranges(numbers: Iterable[int]) -> str:
    """Return rising numbers as text, "0-3, 5"."""
    runs = (list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ", ".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in ends)
