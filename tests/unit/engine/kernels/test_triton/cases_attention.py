"""Attention in Triton against the reference in float64. Run by test_interpreter.py and test_gpu.py."""

import itertools
from dataclasses import replace

import pytest
import torch

from moonpool.engine.kernels.kind import AttentionKind
from moonpool.engine.kernels.triton import attention as launches
from moonpool.engine.kernels.triton import device as code
from moonpool.engine.kernels.triton import ops, tiles, variants
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, SLOWLY, Case, generator, make, slowly

RAGGED = [(1, 33), (5, 21), (1, 1), (3, 3), (17, 60)]
DECODE = [(1, 1), (1, 16), (1, 17), (1, 40)]
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
EACH_DTYPE = pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=SLOWLY) for dtype in DTYPES[1:])])


@EACH_DTYPE
def test_ragged_batch(dtype: torch.dtype) -> None:
    case = make(RAGGED, dtype=dtype)
    case.check(case.prefill())


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(dtype: torch.dtype) -> None:
    case = make(DECODE, dtype=dtype)
    case.check(case.decode())


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [(80, 7, 16), (128, 4, 256), (512, 8, 16), *slowly((64, 1, 64), (96, 16, 64), (128, 7, 16))],
)
def test_shapes(head_dim: int, group: int, block_size: int) -> None:
    shape = {"head_dim": head_dim, "group": group, "block_size": block_size, "kv_heads": 1}
    case = make([(1, 70), (9, 75), (1, 3)], **shape)  # type: ignore[arg-type]
    case.check(case.prefill())
    case = make([(1, 70), (1, 3)], **shape)  # type: ignore[arg-type]
    case.check(case.decode())


@EACH_DTYPE
@pytest.mark.parametrize("length", [17, 75, *slowly((2,), (16,), (33,), (130,))])
def test_dropping_the_last_key_is_out_of_tolerance(length: int, dtype: torch.dtype) -> None:
    """The kernel itself is told a context without the last token: what it gives must not pass for right."""
    case = make([(1, length)], dtype=dtype, group=2)
    case.check(case.decode())
    case.lengths -= 1
    dropped = case.decode()
    case.lengths += 1
    with pytest.raises(AssertionError, match="out of tolerance"):
        case.check(dropped)


EVERY_SHAPE = list(itertools.product((torch.float16,), (64, 80, 96, 128), (1, 4, 7, 16), (16, 64, 256)))
EVERY_SHAPE += itertools.product(DTYPES, (64, 80, 96, 128, 40, 256, 512), (7,), (16, 64))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim", "group", "block_size"), EVERY_SHAPE)
def test_every_shape(dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    case = make(RAGGED, dtype=dtype, head_dim=head_dim, group=group, block_size=block_size)
    case.check(case.prefill())
    case = make(DECODE, dtype=dtype, head_dim=head_dim, group=group, block_size=block_size)
    case.check(case.decode())


@pytest.mark.parametrize(
    ("stored", "block_size"),
    [*zip(QUANTIZED, (16, 64), strict=True), *slowly(*zip(QUANTIZED, (64, 16), strict=True))],
)
def test_quantized(stored: torch.dtype, block_size: int) -> None:
    case = make([(1, 70), (9, 75), (2, 9)], stored=stored, block_size=block_size)
    case.check(case.prefill())


@pytest.mark.slow
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [80, 128, 512])
def test_quantized_shapes(stored: torch.dtype, dtype: torch.dtype, head_dim: int) -> None:
    for deterministic in (False, True):
        case = make(RAGGED, dtype=dtype, stored=stored, head_dim=head_dim, block_size=32, group=7)
        case.check(case.prefill(deterministic=deterministic))
        case = make(DECODE, dtype=dtype, stored=stored, head_dim=head_dim, block_size=256, stride=24)
        case.check(case.decode(deterministic=deterministic))


LATENT = {"kv_heads": 1, "head_dim": 72, "rest": 8}


def parts_from(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Let short contexts be split: into parts of so many keys, or more."""
    for name, value in (("MIN_PART", keys), ("LONG_PART", keys), ("JOINED_AS_KEYS", 0), ("TOGETHER", tiles.ROUNDS)):
        monkeypatch.setattr(tiles, name, value)


@pytest.mark.parametrize(
    ("group", "sizes", "stored"),
    [
        (4, {}, None),
        (20, {"block_size": 64}, torch.int8),
        *slowly(
            (128, {}, None), (16, {"head_dim": 576, "rest": 64}, None), (40, {"head_dim": 288, "rest": 32}, None),
            (20, {}, torch.float8_e4m3fn),
        ),
    ],
)  # fmt: skip
def test_latent_vectors(
    monkeypatch: pytest.MonkeyPatch, group: int, sizes: dict[str, int], stored: torch.dtype | None
) -> None:
    """Latent vectors are keys, their first elements are values; heads of a program, split contexts and exact rows."""
    parts_from(monkeypatch, 16)
    for sequences in ([(1, 40), (1, 7)], [(1, 20), (6, 43)]):
        case = make(sequences, group=group, stored=stored, **LATENT | sizes)  # type: ignore[arg-type]
        case.check(case.prefill())
        case.check(case.prefill(deterministic=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("group", "sizes", "stored"),
    [
        (4, {}, None),
        (20, {"block_size": 64}, torch.int8),
        *slowly((128, {"block_size": 64}, None), (20, {}, QUANTIZED[1])),
    ],
)
def test_chosen_keys(
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    sizes: dict[str, int],
    stored: torch.dtype | None,
    *,
    deterministic: bool,
) -> None:
    """Keys anywhere in the pool, in any order: all of a sequence here, so that any key that is left out is noticed."""
    monkeypatch.setattr(tiles, "MIN_PART", 16)
    case = make([(1, 40), (1, 7), (1, 33)], group=group, stored=stored, **LATENT | sizes)  # type: ignore[arg-type]
    case.check(by_place(case, deterministic=deterministic))
    case.lengths[0] -= 1
    short = by_place(case, deterministic=deterministic)
    case.lengths[0] += 1
    with pytest.raises(AssertionError, match="out of tolerance"):
        case.check(short)


def by_place(case: Case, *, deterministic: bool) -> torch.Tensor:
    """Attention by the places of each sequence's first tokens, shuffled; behind them lies what nothing may use."""
    rng, size, lengths = generator(), case.kv.shape[3], case.lengths.tolist()
    places = torch.full((len(lengths), max(lengths) + 3), 2**30, dtype=torch.int32)
    for row, length in enumerate(lengths):
        tokens = torch.randperm(length, generator=rng)
        places[row, :length] = case.tables[row].cpu()[tokens // size] * size + tokens % size
    out = case.empty()
    ops.chosen_attention(
        case.q, case.kv, case.scales, places.to(DEVICE), case.lengths, case.scale, out, deterministic=deterministic
    )
    return out


@EACH_DTYPE
def test_latent_vectors_of_each_type(dtype: torch.dtype) -> None:
    case = make([(3, 21), (1, 50)], dtype=dtype, group=20, **LATENT)  # type: ignore[arg-type]
    case.check(case.prefill())
    case = make(DECODE, dtype=dtype, group=20, stride=24, **LATENT)  # type: ignore[arg-type]
    case.check(case.decode())


def test_a_prompt_of_many_tiles() -> None:
    case = make([(1, 5), (70, 130)], group=4, block_size=64)
    case.check(case.prefill())


def test_a_split_context_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_from(monkeypatch, 16)
    case = make([(1, 300), (1, 64), (1, 65), (1, 7)], block_size=32, kv_heads=1, head_dim=128)
    joined = _count(monkeypatch, "join_parts")
    case.check(case.decode())
    assert joined == [1]
    case.check(case.decode(max_context=300))
    case = make([(3, 300)], block_size=32, kv_heads=1)
    case.check(case.prefill())
    assert joined == [3], "few rows over a long prefix are split as well"


def test_rows_and_sequences_without_context_are_zero() -> None:
    case = make([(1, 20), (1, 20)])
    case.lengths[1] = 0
    out = case.decode()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.isfinite(out).all()
    out = case.prefill(deterministic=True)
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_sequences_without_rows_and_empty_batches() -> None:
    case = make([(0, 16), (4, 20), (0, 5), (1, 9), (0, 1)])
    case.check(case.prefill())
    for empty in (make([(0, 16)]), make([(0, 3), (0, 4)])):
        assert empty.prefill().shape == empty.q.shape


def test_knowing_the_single_rows_spares_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = _count(monkeypatch, "attention")
    for sequences, singles, launches_ in (([(1, 9), (1, 4)], 2, 1), ([(2, 9), (3, 4)], 0, 1), ([(1, 9), (3, 4)], 1, 2)):
        case = make(sequences)
        case.check(case.prefill(singles=singles))
        assert launched == [launches_]
        launched[0] = 0


def test_more_sequences_than_one_step_of_the_search() -> None:
    case = make([(2, 3)] + [(0, 1)] * 127 + [(2, 2)], kv_heads=1, group=1)
    case.check(case.prefill())


def test_rows_and_blocks_may_be_apart() -> None:
    case = make(RAGGED, stride=8)
    wide = torch.full((case.q.shape[0], case.q.shape[1] + 3, case.q.shape[2]), torch.nan).to(case.q)
    wide[:, : case.q.shape[1]] = case.q
    case.q = wide[:, : case.q.shape[1]]
    case.check(case.prefill())


def test_deterministic_rows_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are the same alone, with others, in chunks, as decode, with and without programs of their own for parts."""
    monkeypatch.setattr(variants, "EXACT_PART", 64)
    case = make([(1, 9), (20, 90), (3, 30)], block_size=32, kv_heads=1)
    whole = case.prefill(deterministic=True)
    case.check(whole)
    rows = slice(1, 21)

    def alone(begin: int, end: int) -> torch.Tensor:
        part = make([(1, 1)], seed=1)
        part.q, part.kv, part.scale = case.q[rows][begin:end], case.kv, case.scale
        part.tables, part.lengths = case.tables[1:2], case.lengths[1:2] - (20 - end)
        part.starts = torch.tensor([0, end - begin], dtype=torch.int32, device=case.q.device)
        return part.prefill(deterministic=True)

    joined = _count(monkeypatch, "join_parts")
    for processors in (0, 1000):
        monkeypatch.setattr(launches, "limits_of", lambda device, n=processors: tiles.Limits(processors=n))
        for begin, end in ((0, 11), (11, 20), (19, 20), (7, 8)):
            assert torch.equal(alone(begin, end), whole[rows][begin:end])
        assert joined == [4 if processors else 0]


KINDS = {
    "window": AttentionKind(window=24),
    "one token": AttentionKind(window=1),
    "chunks": AttentionKind(window=24, chunked=True),
    "cap": AttentionKind(soft_cap=3.0),
    "sinks": AttentionKind(sinks=torch.tensor([-2.0, 0.5, 3.0, 9.0, 0.0, -9.0, 1.0, 2.0])),
    "all": AttentionKind(40, 1.5, torch.tensor([4.0, 0.5, 3.0, -1.0, 0.0, 2.0, 1.0, 2.0])),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("all", torch.float32),
        *(pytest.param(name, torch.float32, marks=SLOWLY) for name in KINDS if name != "all"),
        pytest.param("all", torch.bfloat16, marks=SLOWLY),
    ],
)
def test_kinds(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """Windows that begin within a step of keys, before a part and before a tile's first row; each alone and all."""
    parts_from(monkeypatch, 32)
    for sequences in ([(1, 90), (1, 7), (1, 24), (1, 25)], [(9, 45), (1, 40), (20, 70)]):
        case = make(sequences, dtype=dtype, block_size=32)
        sinks = KINDS[name].sinks
        case.kind = replace(KINDS[name], sinks=None if sinks is None else sinks.to(case.q))
        for deterministic in (False, True):
            case.check(case.prefill(deterministic=deterministic))
            if len(case.q) == len(case.lengths):
                case.check(case.decode(deterministic=deterministic))


def test_a_key_before_the_window_is_out_of_tolerance() -> None:
    case = make([(1, 90)], block_size=32)
    case.kind = AttentionKind(window=31)
    wider = case.decode()
    case.check(wider)
    case.kind = AttentionKind(window=30)
    with pytest.raises(AssertionError, match="out of tolerance"):
        case.check(wider)


def test_native_float8_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([(1, 20), (3, 9)], stored=torch.float8_e4m3fn, kv_heads=1)
    by_bits = case.prefill()
    monkeypatch.setattr(launches, "limits_of", lambda device: tiles.Limits(float8=True))
    torch.testing.assert_close(case.prefill(), by_bits, rtol=0, atol=1e-3)


def test_a_large_pool_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets need 64 bits: blocks that are far apart in address space, only some of which exist in memory."""
    case = make([(1, 20), (2, 5)], kv_heads=1)
    blocks, distance = case.kv.shape[0], 2**31 // 4 + 64
    try:
        far = torch.empty((blocks - 1) * distance + case.kv[0].numel(), dtype=case.kv.dtype, device=case.kv.device)
    except RuntimeError:
        pytest.skip("no room for so many addresses")
    spread = far.as_strided(case.kv.shape, (distance, *case.kv.stride()[1:]))
    spread.copy_(case.kv)
    case.kv = spread
    case.check(case.prefill())


def _count(monkeypatch: pytest.MonkeyPatch, kernel: str) -> list[int]:
    """Count launches of a kernel."""
    calls = [0]
    original = getattr(code, kernel)

    class Counting:
        def __getitem__(self, grid: object) -> object:
            calls[0] += 1
            return original[grid]

    monkeypatch.setattr(code, kernel, Counting())
    return calls
