"""Rotary position embeddings as config.json says them, in both spellings of transformers. Torch-free.

`rope_theta` and `rope_scaling` are the old spelling, `rope_parameters` is transformers 5's. A set `rope_scaling` wins.
Formulas are those of transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import RopeScaling, RopeSpec

_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional", "mrope")
_LONG = "long_factor_for_all"
"""Set by `chosen_factors`."""


def read_rope(fields: JsonFields, head_dim: int, *, kind: str | None = None, paired: bool = False) -> RopeSpec:
    """Return the rotary embedding table for heads with `head_dim` elements.

    Args:
        fields: config.json.
        head_dim: elements in a head; `partial_rotary_factor` says how many are rotated.
        kind: kind of layer, for example "full_attention", where parameters may differ between kinds.
        paired: whether the checkpoint has elements that turn together beside one another.

    Raises:
        CheckpointError: a value is malformed; names the key.
        UnsupportedModel: a kind of scaling that is not built; names the key.
    """
    rope, name = _parameters(fields, kind)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if rope.get("rope_type", rope.get("type")) == "proportional":  # the other frequencies of the whole head are 0
        turned = int(share * head_dim // 2)
        divisors = (rope.number("factor", 1.0),) * turned + (math.inf,) * (head_dim // 2 - turned)
        return RopeSpec(theta, head_dim, RopeScaling("divisors", 1.0, divisors=divisors), paired)
    width = int(head_dim * share)
    scaling, magnitude = _scaling(fields, rope, name, theta, width)
    return RopeSpec(theta, width, scaling, paired, magnitude)


def chosen_factors(fields: JsonFields, max_model_len: int) -> JsonFields:
    """Return the fields with LongRoPE's long factors for all sequences, if `max_model_len` is beyond the short ones'.

    A sequence's KV must not depend on how long the sequence becomes, so that one of both holds for all.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(name)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "longrope":
        return fields
    if max_model_len <= _original(fields, JsonFields(rope, f"{fields.source}: {name}")):
        return fields
    chosen = {**rope, "short_factor": rope.get("long_factor"), _LONG: True}
    return JsonFields({**fields.all(), name: chosen}, fields.source)


def longest(fields: JsonFields) -> int:
    """Return the positions for which frequencies do not depend on the sequence's length.

    "longrope" and "dynamic" change all positions' frequencies when a sequence outgrows the original length. The KV of a
    prefix would then depend on what follows, so that no sequence may outgrow the original length.
    """
    positions = fields.positive("max_position_embeddings")
    rope, _ = _parameters(fields, "full_attention")
    if rope.get("rope_type", rope.get("type", "default")) != "longrope" or rope.flag(_LONG, False):
        return positions
    return min(positions, _original(fields, rope))


def yarn_scale(fields: JsonFields, scale: float) -> float:
    """Return DeepSeek's attention score scale: `scale` times the square of YaRN's magnitude over all dimensions."""
    rope, _ = _parameters(fields, None)
    everywhere = rope.number("mscale_all_dim", 0.0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not everywhere:
        return scale
    return scale * _magnitude(rope.number("factor"), everywhere) ** 2


def _parameters(fields: JsonFields, kind: str | None) -> tuple[JsonFields, str]:
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    raw = fields.get(name) or {}
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{fields.source}: {name} must be an object, not {raw!r}")
    if any(isinstance(value, Mapping) for value in raw.values()):
        if kind is None:
            raise UnsupportedModel(name, "RoPE that differs between layers is not supported for this model")
        raw, name = raw.get(kind) or {}, f"{name}.{kind}"
    return JsonFields(raw, f"{fields.source}: {name}"), name


def _scaling(
    fields: JsonFields, rope: JsonFields, name: str, theta: float, width: int
) -> tuple[RopeScaling | None, float]:
    """Return the frequency scaling and the factor for cosine and sine."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KINDS:
        raise UnsupportedModel(f"{name}.rope_type", f"{kind!r} is none of {', '.join(_KINDS)}")
    # dynamic: the frequencies for the first max_position_embeddings positions; mrope: a token of text has one position
    if kind in ("default", "dynamic", "mrope"):
        return None, 1.0
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor")), 1.0
    original = _original(fields, rope)
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3", rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor"), original
        )
        if not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
            raise CheckpointError(f"{rope.source}.low_freq_factor must be positive and below high_freq_factor")
        return scaling, 1.0
    if kind == "yarn":
        return _yarn(fields, rope, theta, width, original)
    factor = rope.number("factor", fields.positive("max_position_embeddings") / original)
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = rope.get("short_factor")
    if not isinstance(divisors, list) or len(divisors) != width // 2:
        which = "long_factor" if rope.flag(_LONG, False) else "short_factor"
        raise CheckpointError(f"{rope.source}.{which} must be a list of {width // 2} numbers")
    numbers = tuple(JsonFields({"short_factor": value}, rope.source).number("short_factor") for value in divisors)
    return RopeScaling("divisors", 1.0, divisors=numbers), rope.number("attention_factor", magnitude)


def _yarn(fields: JsonFields, rope: JsonFields, theta: float, width: int, original: int) -> tuple[RopeScaling, float]:
    factor = rope.number("factor", fields.positive("max_position_embeddings") / original)
    over, under = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    magnitude = _magnitude(factor, over) / _magnitude(factor, under) if over and under else _magnitude(factor, 1.0)

    def pair(rotations: float) -> float:
        """Return the pair of elements that turns so many times over the original length."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(rope.number("beta_fast", 32.0) or 32.0), pair(rope.number("beta_slow", 1.0) or 1.0)
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    ramp = (float(max(low, 0)), float(min(high, width - 1)))
    scaling = RopeScaling("yarn", factor, original_max_position_embeddings=original, ramp=ramp)
    return scaling, rope.number("attention_factor", magnitude)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _original(fields: JsonFields, rope: JsonFields) -> int:
    """Return the length before scaling: the configuration's own (as Phi-3's), else the scaling's."""
    positions = fields.positive("max_position_embeddings")
    inner = rope.positive("original_max_position_embeddings", positions)
    return fields.positive("original_max_position_embeddings", inner)
