"""Layouts of several groups of layers, and what older programs make of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moonpool.base.errors import ConfigError, FrameError, InvalidRequest, Mismatch
from moonpool.base.kv.frames import FrameOpener, pack_frames, run_bytes, whole_runs
from moonpool.base.kv.keys import namespace, slice_hash
from moonpool.base.kv.layout import NO_SLOT, KVGroup, KVLayout, LayerKV
from moonpool.base.kv.pool import KVPool, PoolTarget
from moonpool.engine.kernels import kv_quantization
from moonpool.v1 import kv_pb2
from tests.layouts import GROUPED, uniform_like
from tests.slices import slice_to_send

UNIFORM = KVLayout.uniform(layers=3, kv_heads=2, head_dim=4, block_size=16, dtype="bfloat16")
FULL, WINDOWED = GROUPED.groups


def test_slices_have_the_sizes_of_their_groups() -> None:
    assert [GROUPED.slice_bytes(layer) for layer in range(4)] == [1024, 2048, 1024, 2048]
    assert GROUPED.block_bytes == 6144
    assert GROUPED.token_bytes == 384
    assert GROUPED.largest_slice_bytes == 2048
    assert GROUPED.place(2) == slice(3072, 4096)
    assert GROUPED.place(2, 1) == slice(2048, 3072)
    assert GROUPED.layers_bytes(range(1, 3)) == 3072
    assert GROUPED.layers_in(1, 3072) == range(1, 3)
    assert [tuple(group) for group in GROUPED.equal_slices(range(4))] == [
        (range(layer, layer + 1), size) for layer, size in enumerate((1024, 2048, 1024, 2048))
    ]


def test_heads_divide_into_shares_that_all_layers_have() -> None:
    assert GROUPED.head_shares == 2
    assert [GROUPED.share_bytes(layer) for layer in range(2)] == [512, 1024]
    with pytest.raises(InvalidRequest):
        GROUPED.check_part(range(4), range(3))


def test_a_latent_vector_has_one_plane() -> None:
    """DeepSeek V3 and Kimi K2: 512 elements and 64 that are rotated, of bfloat16."""
    latent = KVLayout.of_layers(64, [LayerKV(1, 576, "bfloat16", "latent")] * 61)
    assert latent.slice_bytes(0) == 64 * 1152
    assert latent.token_bytes == 61 * 1152
    assert len(latent.groups) == 1
    assert not latent.is_uniform


def test_a_recurrent_state_has_a_size_of_its_own() -> None:
    """Qwen3-Next: 32 heads of 128 * 128, and 3 inputs of 8,192 channels, beside KV heads of 256 elements."""
    state = LayerKV(2, (32 * 128 * 128 + 3 * 8192) // 2, "float32", "recurrent")
    small, large = (KVLayout.of_layers(size, [state, LayerKV(2, 256, "bfloat16")]) for size in (64, 1024))
    assert small.slice_bytes(0) == large.slice_bytes(0) == small.state_bytes == 2_195_456
    assert small.recurrent
    assert small.head_shares == 2
    assert not GROUPED.recurrent
    assert GROUPED.state_bytes == 0


def test_a_state_of_a_part_filled_block_stays_whole() -> None:
    layout = KVLayout.of_layers(16, [LayerKV(1, 6, "float32", "recurrent"), LayerKV(1, 2, "float32")])
    for layer, kept in ((0, 24), (1, 16)):
        data = memoryview(bytearray(b"\1" * layout.slice_bytes(layer)))
        layout.zero_invalid(layer, data, 1)
        assert bytes(data).count(1) == kept


def test_a_recurrent_state_has_no_scales() -> None:
    with pytest.raises(ConfigError, match="no scales"):
        KVGroup((0,), 1, 8, "int8", "recurrent")


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ((dataclasses.replace(FULL, layers=(0,)), WINDOWED), "groups"),
        ((FULL, WINDOWED, WINDOWED), "groups"),
        ((), "layers"),
    ],
)
def test_each_layer_is_in_one_group(groups: tuple[KVGroup, ...], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KVLayout(16, groups)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", (1, 0)), ("layers", ()), ("kv_heads", 0), ("head_dim", 4097), ("kind", "state"), ("window", 0)],
)
def test_a_group_names_what_is_wrong(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(WINDOWED, **{field: value})
    assert caught.value.field == field
    with pytest.raises(ConfigError, match="have none"):
        dataclasses.replace(WINDOWED, kind="full")


def test_a_grouped_layout_comes_back_as_it_was_sent() -> None:
    latent = KVLayout.of_layers(16, [LayerKV(1, 24, "float32", "latent")] * 3)
    quantised = KVLayout.of_layers(16, [LayerKV(2, 8, "int8"), LayerKV(1, 16, "int8", "window", 20)])
    hybrid = KVLayout.of_layers(16, [LayerKV(2, 5000, "float32", "recurrent"), LayerKV(2, 8, "int8")])
    for layout, version in ((GROUPED, 3), (latent, 2), (quantised, 4), (hybrid, 4)):
        found = KVLayout.from_proto(kv_pb2.KVLayout.FromString(layout.to_proto().SerializeToString()))
        assert found == layout
        assert found.version == version


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 5}, "layout.version"),
        ({"version": 2}, "layout.version"),
        ({"version": 1}, "layout.groups"),
        ({"layers": 5}, "layout.layers"),
    ],
)
def test_a_message_that_contradicts_itself_is_refused_by_field(change: dict[str, int], field: str) -> None:
    message = GROUPED.to_proto()
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(Mismatch) as caught:
        KVLayout.from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("planes", 1, "layout.groups"),
        ("scale_bytes", 4, "layout.groups"),
        ("kind", 9, "layout.groups"),
        ("window", 0, "layout.window"),
        ("head_dim", 0, "layout.head_dim"),
    ],
)
def test_a_group_that_is_not_known_is_refused_by_field(name: str, value: int, field: str) -> None:
    message = GROUPED.to_proto()
    setattr(message.groups[1], name, value)
    with pytest.raises(Mismatch) as caught:
        KVLayout.from_proto(message)
    assert caught.value.field == field


def test_a_difference_names_the_group_and_the_field() -> None:
    other = KVLayout(16, (FULL, dataclasses.replace(WINDOWED, window=32)))
    found = GROUPED.difference(other)
    assert found == ("groups[1].window", 20, 32)
    assert UNIFORM.difference(GROUPED) == ("version", 1, 3)
    assert GROUPED.difference(KVLayout(16, (FULL, WINDOWED))) is None


# --- recorded from the program before groups (version 1) -------------------------------------------------------------

RECORDED = {
    "08011003180220042810320862666c6f61743136": (
        UNIFORM,
        "25d6fbb1c1cbdf878f82df868685a3883d0dfa70b1ec50afff4c7bd8aad107fd",
    ),
}


@pytest.mark.parametrize("message", RECORDED)
def test_uniform_layouts_are_those_of_version_1(message: str) -> None:
    layout, space = RECORDED[message]
    assert layout.to_proto().SerializeToString(deterministic=True).hex() == message
    assert KVLayout.from_proto(kv_pb2.KVLayout.FromString(bytes.fromhex(message))) == layout
    assert namespace(bytes(range(32)), layout).hex() == space


SCALES_BEHIND_ALL_HEADS = ["080110021802200828103204696e7438388002"]


def with_old_scales(layout: KVLayout, version: int) -> str:
    message = layout.to_proto()
    message.version = version
    return message.SerializeToString().hex()


def test_layouts_with_scales_behind_all_heads_are_refused_by_version() -> None:
    """As versions 1 to 3 had them: a uniform one, recorded, and one of several groups."""
    several = KVLayout.of_layers(16, [LayerKV(2, 8, "int8"), LayerKV(1, 16, "int8", "window", 20)])
    for message in (*SCALES_BEHIND_ALL_HEADS, with_old_scales(several, 2), with_old_scales(several, 3)):
        with pytest.raises(Mismatch) as caught:
            KVLayout.from_proto(kv_pb2.KVLayout.FromString(bytes.fromhex(message)))
        assert caught.value.field == "layout.version"


def test_heads_with_their_scales_are_one_run_of_bytes() -> None:
    """Of a range of heads: as if the model had these heads alone."""
    whole = KVLayout.uniform(layers=1, kv_heads=4, head_dim=8, block_size=16, dtype="int8")
    some = KVLayout.uniform(layers=1, kv_heads=2, head_dim=8, block_size=16, dtype="int8")
    data = torch.randint(0, 256, (3, whole.slice_bytes(0)), dtype=torch.uint8)
    values, scales = kv_quantization.views(data, torch.int8, kv_heads=4, block_size=16, head_dim=8)
    run = data[:, whole.share_bytes(0) : 3 * whole.share_bytes(0)]
    assert run.shape[1] == some.slice_bytes(0)
    parts = kv_quantization.views(run, torch.int8, kv_heads=2, block_size=16, head_dim=8)
    assert torch.equal(parts[0], values[:, 1:3])
    assert torch.equal(parts[1].view(torch.int32), scales[:, 1:3].view(torch.int32))


def test_a_program_of_version_1_refuses_groups_by_version() -> None:
    """That program looks at ranges first, then at the version: all other fields must be within its ranges."""
    message = GROUPED.to_proto()
    assert message.version == 3
    assert 1 <= message.layers <= 4096
    assert 1 <= message.kv_heads <= 1024
    assert 1 <= message.head_dim <= 4096
    assert message.block_size % 16 == 0
    assert message.dtype in ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


# --- identity and movement -------------------------------------------------------------------------------------------


def test_whatever_a_group_says_changes_the_namespace() -> None:
    changes: list[dict[str, Any]] = [{"window": 32}, {"head_dim": 16}, {"kv_heads": 2}]
    changed = [dataclasses.replace(WINDOWED, **change) for change in changes]
    layouts = [GROUPED, *(KVLayout(16, (FULL, group)) for group in changed), uniform_like(UNIFORM, layers=4)]
    swapped = (dataclasses.replace(FULL, layers=(1, 3)), dataclasses.replace(WINDOWED, layers=(0, 2)))
    layouts.append(KVLayout(16, swapped))
    assert len({namespace(bytes(32), layout) for layout in layouts}) == len(layouts)


def filled(layer: int, block: int) -> bytearray:
    return bytearray((17 * layer + 5 * block + at) % 251 for at in range(GROUPED.slice_bytes(layer)))


@pytest.mark.parametrize("target_bytes", [600, 1500, 1 << 20])
def test_slices_of_all_sizes_travel(target_bytes: int) -> None:
    slices = [
        slice_to_send(GROUPED, layer, block, filled(layer, block), 16 if block == 0 else 5)
        for layer in range(4)
        for block in range(2)
    ]
    opener, found = FrameOpener(GROUPED), dict[tuple[int, int], bytes]()
    for header, pieces in pack_frames(1, 1, slices, GROUPED, target_bytes):
        payload = memoryview(b"".join(pieces))
        for run, data, _ in opener.open(header, payload):
            size = run_bytes(run, GROUPED) // run.block_count
            for at in range(run.block_count):
                found[run.layer, run.first_block + at] = bytes(data[at * size : (at + 1) * size])
        if target_bytes == 1 << 20:
            assert whole_runs(header, payload.nbytes, GROUPED) is not None
    for layer in range(4):
        last = memoryview(filled(layer, 1))
        GROUPED.zero_invalid(layer, last, 5)
        assert (found[layer, 0], found[layer, 1]) == (bytes(filled(layer, 0)), bytes(last))


def test_a_run_of_a_layer_that_there_is_not_is_refused() -> None:
    ((header, pieces),) = pack_frames(1, 1, [slice_to_send(GROUPED, 3, 0, filled(3, 0))], GROUPED)
    with pytest.raises(FrameError, match="no such layer"):
        FrameOpener(UNIFORM).parse(header, memoryview(b"".join(pieces)))


def test_a_pool_has_slices_of_windowed_layers_for_its_slots_alone() -> None:
    pool = KVPool.create(GROUPED, 5, [(0, 1), (1, 4)], slots=2)
    assert pool.nbytes == 5 * 2 * 1024 + 2 * 2 * 2048 == GROUPED.pool_bytes(5, 2)
    assert [pool.has(layer, 3) for layer in range(4)] == [True, False, True, False]
    pool.move_slots([(3, 1), (0, 0)])
    for layer in range(4):
        for block in (3, 0):
            pool.write(layer, block, memoryview(filled(layer, block)), 7)
    pool.write(0, 4, memoryview(filled(0, 4)), 7)
    pool.move_slots([(0, NO_SLOT), (4, 0)])
    assert [pool.has(1, block) for block in range(5)] == [False, False, False, True, True]
    assert bytes(pool.read(1, 4)[0]) == bytes(filled(1, 0)), "what lay there"
    assert bytes(pool.read(3, 3)[0]) == bytes(filled(3, 3))
    target = PoolTarget(pool, [0, 3])
    assert target.into(1, 0) is None
    target.take(1, 0, memoryview(filled(1, 0)), 9)
    landed = target.into(1, 1)
    assert landed is not None
    landed[:] = filled(1, 2)
    target.take(1, 1, landed, 9)
    assert bytes(pool.read(1, 3)[0]) == bytes(filled(1, 2))
    pool.parts[1].seal([(1, 0, 16)])  # nothing was computed there
    pool.parts[1].copy(3, 1)
    assert bytes(pool.read(2, 1)[0]) == bytes(filled(2, 3))
    pool.close()


@pytest.mark.parametrize(("blocks", "longest", "slots"), [(4, 0, 4), (40, 0, 7), (1000, 0, 71), (1000, 320, 150)])
def test_a_pool_is_divided_by_a_typical_sequence(blocks: int, longest: int, slots: int) -> None:
    """Windows of two blocks: a sequence holds three of its 256, or of its 20, blocks; steps of 40 tokens take four.

    An eighth of the bytes are windowed slices in any case.
    """
    assert GROUPED.window_slots(blocks, 40, longest) == slots
    nbytes = GROUPED.pool_bytes(blocks, slots)
    assert GROUPED.blocks_in(nbytes, 40, longest) == blocks
    assert GROUPED.blocks_in(nbytes - 1, 40, longest) == blocks - 1
    assert GROUPED.blocks_in(100, 40, longest) == 0


def test_a_sequence_holds_all_its_blocks_of_full_layers_and_of_others_its_window() -> None:
    assert GROUPED.sequence_bytes(20) == 2 * GROUPED.block_bytes
    assert GROUPED.sequence_bytes(1600) == 100 * 2 * 1024 + 3 * 2 * 2048
    assert UNIFORM.sequence_bytes(33) == 3 * UNIFORM.block_bytes
    assert UNIFORM.window_slots(100, 40, 0) == 0
    assert UNIFORM.blocks_in(10 * UNIFORM.block_bytes + 1, 40, 0) == 10


def test_a_hybrid_needs_few_states() -> None:
    layout = KVLayout.of_layers(64, [LayerKV(2, 8, "float32"), LayerKV(2, 8192, "float32", "recurrent")])
    assert layout.states_alone
    assert not GROUPED.states_alone
    assert layout.window_slots(1000, 512, 0) == 32, "two of 64 blocks"
    assert layout.window_slots(64, 512, 0) == 5, "a sequence and a step"
    small = KVLayout.of_layers(64, [LayerKV(2, 8, "float32"), LayerKV(2, 512, "float32", "recurrent")])
    assert small.window_slots(1000, 512, 0) == 285


def test_a_pool_holds_slices_of_all_sizes() -> None:
    pool = KVPool.create(GROUPED, 3, [(0, 1), (1, 4)])
    cells = [(layer, block) for layer in range(4) for block in range(3)]
    for layer, block in cells:
        pool.write(layer, block, memoryview(filled(layer, block)), layer * 10 + block)
    for layer, block in cells:
        data, value = pool.read(layer, block)
        assert (bytes(data), value) == (bytes(filled(layer, block)), layer * 10 + block)
    assert pool.nbytes == 3 * GROUPED.block_bytes
    pool.seal(1, 2, 5)
    cleaned = memoryview(filled(1, 2))
    GROUPED.zero_invalid(1, cleaned, 5)
    assert pool.read(1, 2)[1] == slice_hash(cleaned)
    pool.close()
