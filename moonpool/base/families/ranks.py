"""How the ranks of a stage divide layers: heads, inner states, experts' inner states. Torch-free.

Each rank computes some heads of attention and some inner states of the feed-forward part (Shoeybi et al. 2019,
Megatron-LM). If there are fewer heads of keys and values than ranks, several ranks have the same head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.spec import DecoderSpec, FeedForwardSpec, LayerSpec

SETTING = "tensor_parallel_size"


def heads_of_rank(heads: int, rank: int, ranks: int) -> range:
    """Return a rank's heads; `check_ranks` has found that they can be divided, or that several ranks have the same."""
    first = rank * heads // ranks
    return range(first, first + max(1, heads // ranks))


def first_with_head(heads: int, rank: int, ranks: int) -> int:
    """Return the first rank that has the same head as this one; the rank itself if there are as many heads as ranks."""
    return -(-heads_of_rank(heads, rank, ranks).start * ranks // heads)


def check_ranks(decoder: DecoderSpec, ranks: int, architecture: str) -> None:
    """Check that a stage of this model can have so many ranks.

    Raises:
        UnsupportedModel: with `SETTING`: says what cannot be divided.
    """
    if ranks == 1:
        return
    if decoder.other:
        raise UnsupportedModel(SETTING, f"not for {architecture}, which transformers' own code computes")
    for index, layer in enumerate(decoder.every):
        for why in _why_not(layer, ranks):
            raise UnsupportedModel(SETTING, f"{ranks} ranks cannot divide layer {index} of {architecture}: {why}")


def layer_of_rank(layer: LayerSpec, ranks: int) -> LayerSpec:
    """Return the layer as one of `ranks` ranks computes it."""
    heads, network = layer.attention, layer.feed_forward
    if layer.indexer is not None:  # whole on every rank, so that all choose the same keys
        return layer
    kv_heads = max(1, heads.num_kv_heads // ranks)
    heads = replace(heads, num_heads=heads.num_heads // ranks, num_kv_heads=kv_heads)
    return replace(layer, attention=heads, feed_forward=_network_of_rank(network, ranks))


def decoder_of_rank(decoder: DecoderSpec, ranks: int) -> DecoderSpec:
    """Return the decoder with each layer as one of `ranks` ranks computes it."""
    layers, tail = (tuple(layer_of_rank(layer, ranks) for layer in part) for part in (decoder.layers, decoder.tail))
    return replace(decoder, layers=layers, tail=tail)


def share_of_rank(decoder: DecoderSpec, ranks: int) -> str:
    """Return what each of so many ranks has of the widest layers, for people."""

    def widest(layers: DecoderSpec) -> tuple[int, int, int]:
        every = layers.every
        heads, kv = (max(getattr(layer.attention, name) for layer in every) for name in ("num_heads", "num_kv_heads"))
        networks = [layer.feed_forward for layer in every]
        return heads, kv, max(each.inner if each.experts is None else each.experts.inner for each in networks)

    names = ("heads", "heads of keys and values", "inner states")
    both = zip(names, widest(decoder_of_rank(decoder, ranks)), widest(decoder), strict=True)
    return f"{ranks} processes; each has " + ", ".join(f"{own} of {all_} {name}" for name, own, all_ in both)


def _network_of_rank(network: FeedForwardSpec, ranks: int) -> FeedForwardSpec:
    experts = network.experts
    if experts is not None:
        inner, shared = experts.inner // ranks, experts.shared_inner // ranks
        experts = replace(experts, inner=inner, shared_inner=shared)
    return replace(network, inner=network.inner // ranks, experts=experts)


def _why_not(layer: LayerSpec, ranks: int) -> Iterator[str]:
    """Yield what of a layer `ranks` ranks cannot divide."""
    attention, network, experts = layer.attention, layer.feed_forward, layer.feed_forward.experts
    if layer.recurrent is not None:
        yield "a recurrent state has no shares by head"
        return
    if layer.indexer is not None:
        return
    if attention.num_heads % ranks:
        yield f"{attention.num_heads} heads"
    if attention.num_kv_heads % ranks and ranks % attention.num_kv_heads:
        yield f"{attention.num_kv_heads} heads of keys and values"
    inner = {"inner states": network.inner if experts is None or experts.beside else 0}
    if experts is not None:
        inner |= {"inner states of an expert": experts.inner, "inner states of the shared expert": experts.shared_inner}
    for what, width in inner.items():
        if width % ranks:
            yield f"{width} {what}"
