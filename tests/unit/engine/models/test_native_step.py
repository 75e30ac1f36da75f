"""The native step beside the torch stage, on fresh shapes and batches; what it leaves out, where it stops."""

import os
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.base.checkpoint import ModelConfig, load_config
from moonpool.engine.kernels import kv_quantization, reference
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.native import library
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

FAMILIES = ("tiny-llama", "tiny-llama3", "tiny-mistral", "tiny-qwen2", "tiny-qwen3")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 16
SPARE = 9
"""Blocks that no sequence has."""
MOST = 40
"""Sequences of the largest batch."""
BORDERS = (0, 1, 14, 15, 16, 17, 30, 31, 32, 33)
"""Tokens before a chunk: around the borders of blocks."""
CHUNKS = [(start, end) for start in BORDERS for end in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49) if start < end]
"""Every border at which a chunk may begin, with every one at which it may end."""
CHUNKS_A_TEST = -(-len(CHUNKS) // (MOST // len(DTYPES)))
"""So many of them in a test: each element type meets them all."""
ROWS = 24
"""Of decode steps, that an error is a mean of at least: a single row's varies."""
FURTHER = 2
"""Steps that decode steps go on by."""


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@contextmanager
def kernels(mode: str) -> Iterator[None]:
    """Run with the native kernels ("native" or "") or with torch's operators ("torch")."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mode
    try:
        yield
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})


class Checked:
    """A stage of all layers that always runs with the same kernels."""

    def __init__(self, path: Path, dtype: torch.dtype, mode: str) -> None:
        self.mode, self.config, self.dtype = mode, load_config(path), dtype
        with kernels(mode):
            self.stage = load_stage(path, self.config, dtype, 0, self.config.num_layers)

    def run(self, batch: PackedBatch, prefixes: Tensor, **how: Any) -> tuple[int, Tensor, Tensor]:
        """(layer that it came to, hidden states, pool) of a run after `prefixes` [layers, blocks, ...]."""
        pool = prefixes.to(self.dtype).clone()
        return *self.go_on(self.stage.embed(batch.token_ids), batch, pool, 0, **how), pool

    def go_on(self, hidden: Tensor, batch: PackedBatch, pool: Tensor, first: int, **how: Any) -> tuple[int, Tensor]:
        """(layer that it came to, hidden states) of a run from layer `first` on."""
        with kernels(self.mode):
            return self.stage.run(hidden, batch, pool, first, self.config.num_layers, **how)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of every row, written where NaN was."""
        with kernels(self.mode):
            out = torch.full((len(hidden), self.config.vocab_size), torch.nan)
            return self.stage.logits(hidden, out)

    def further(self, batch: PackedBatch, pool: Tensor, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of the steps after `batch`, in which its sequences go on by these tokens; written where NaN was."""
        with kernels(self.mode):
            if self.mode == "torch":
                return [self._after(batch := batch.after(token), pool) for token in tokens]
            chosen = array("i", tokens[0])
            run = self.stage.native_run(batch, pool, len(tokens), chosen.buffer_info()[0])
            assert run is not None
            logits = []
            for token in tokens:
                chosen[:] = array("i", token)
                run.logits.fill_(torch.nan)
                assert run.go_on().steps == 1
                logits.append(run.logits.clone())
            return logits

    def _after(self, batch: PackedBatch, pool: Tensor) -> Tensor:
        return self.logits(self.stage.forward(batch.token_ids, batch, pool))


@dataclass
class Work:
    """Sequences over a pool."""

    parts: list[tuple[bytes, int, list[int]]]

    @property
    def batch(self) -> PackedBatch:
        return PackedBatch.build(self.parts, BLOCK)


def draw(config: ModelConfig, chosen: random.Random, sequences: int, most: int) -> tuple[Work, Tensor]:
    """Sequences of up to `most` tokens, as `of_chunks`."""
    starts = [chosen.choice((*BORDERS, chosen.randrange(40))) for _ in range(sequences)]
    return of_chunks(config, chosen, [(start, start + chosen.randint(1, most)) for start in starts])


def of_chunks(config: ModelConfig, chosen: random.Random, chunks: Sequence[tuple[int, int]]) -> tuple[Work, Tensor]:
    """Sequences with blocks in no order, and the KV of their prefixes; free slots hold NaN."""
    blocks_of = [-(-(end + FURTHER) // BLOCK) for _, end in chunks]
    free = list(range(sum(blocks_of) + SPARE))
    chosen.shuffle(free)
    shape = (config.num_layers, len(free), config.num_kv_heads, 2, BLOCK, config.head_dim)
    prefixes, parts = torch.full(shape, torch.nan), []
    generator = torch.Generator().manual_seed(chosen.randrange(1 << 30))
    for (before, end), count in zip(chunks, blocks_of, strict=True):
        table = [free.pop() for _ in range(count)]
        position = torch.arange(before)
        blocks, slots = torch.tensor(table)[position // BLOCK], position % BLOCK
        kv = torch.randn(before, shape[0], shape[2], 2, shape[5], generator=generator)
        prefixes[:, blocks, :, :, slots] = kv
        tokens = array("i", (chosen.randrange(config.vocab_size) for _ in range(end - before)))
        parts.append((tokens.tobytes(), before, table))
    return Work(parts), prefixes.bfloat16()  # exact in every type that is used


def poison(checked: Checked) -> None:
    """Leave NaN in the memory that the native step works in."""
    config, batch = checked.config, Work([(bytes(4 * 300), 0, list(range(19)))]).batch
    pool = torch.zeros(config.num_layers, 19, config.num_kv_heads, 2, BLOCK, config.head_dim, dtype=checked.dtype)
    hidden = torch.full((300, config.hidden_size), torch.nan, dtype=checked.dtype)
    checked.stage.run(hidden, batch, pool, 0, config.num_layers)


def close(mine: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Written where the torch stage writes, and not further from the exact numbers than it, by more than a little."""
    assert torch.equal(torch.isnan(mine), torch.isnan(theirs))
    there = ~torch.isnan(exact)
    own, others = (float((number.double() - exact)[there].abs().mean()) for number in (mine, theirs))
    assert own <= 1.25 * others + 2e-6 * float(exact[there].abs().mean())


def shape_of(chosen: random.Random) -> dict[str, int]:
    kv_heads = chosen.choice((1, 2, 3))
    return {
        "hidden_size": 2 * chosen.randrange(20, 70),
        "intermediate_size": 2 * chosen.randrange(20, 110),
        "num_hidden_layers": 2,
        "num_attention_heads": kv_heads * chosen.choice((1, 2, 4, 7)),
        "num_key_value_heads": kv_heads,
        "head_dim": chosen.choice((16, 48, 64)),
    }


def results(
    checked: Checked, work: Work, prefixes: Tensor, tokens: Sequence[Sequence[int]], threads: int
) -> list[Tensor]:
    """Hidden states, logits and pool; where each chunk is one token, also logits of steps that go on by these tokens.

    Torch has one thread: others of its own would wait at full speed.
    """
    torch.set_num_threads(threads if checked.mode == "native" else 1)
    pool, batch = prefixes.to(checked.dtype).clone(), work.batch
    _, hidden = checked.go_on(checked.stage.embed(batch.token_ids), batch, pool, 0)
    more = checked.further(batch, pool, tokens) if len(hidden) == len(work.parts) else []
    return [hidden, checked.logits(hidden), pool, *more]


def compare(
    three: Sequence[Checked], chosen: random.Random, chunks: Sequence[tuple[int, int]], *, batches: int = 1
) -> None:
    """Compare such batches natively, in torch, and exactly; errors are means over all of them."""
    config = three[0].config
    found: list[list[list[Tensor]]] = [[] for _ in three]
    for _ in range(batches):
        work, prefixes = of_chunks(config, chosen, chunks)
        tokens = [[chosen.randrange(config.vocab_size) for _ in chunks] for _ in range(FURTHER)]
        threads = chosen.randint(1, 2)
        poison(three[0])
        for checked, outputs in zip(three, found, strict=True):
            outputs.append(results(checked, work, prefixes, tokens, threads))
    for parts in zip(*(zip(*each, strict=True) for each in found), strict=True):
        mine, theirs, exact = map(torch.cat, parts)
        close(mine, theirs, exact.double())


@pytest.mark.parametrize(
    "sequences",
    [pytest.param(number, marks=pytest.mark.slow if number % 7 != 1 else ()) for number in range(1, MOST + 1)],
)
@torch.inference_mode()
def test_the_torch_stage_on_fresh_shapes(sequences: int, tmp_path: Path) -> None:
    """Each batch has its own shape; families and types go round, so that each meets small, middle and large batches."""
    chosen, family = random.Random(sequences), FAMILIES[sequences % len(FAMILIES)]
    path = create(family, tmp_path / "model", sequences, "bfloat16", overrides=shape_of(chosen))
    turn, kind = divmod(sequences, len(DTYPES))
    dtype = DTYPES[kind]
    three = [
        Checked(path, precision, mode)
        for precision, mode in ((dtype, "native"), (dtype, "torch"), (torch.float32, "torch"))
    ]
    decode = [(start, start + 1) for start in (BORDERS[(sequences + i) % len(BORDERS)] for i in range(sequences))]
    borders = [CHUNKS[(turn * CHUNKS_A_TEST + i) % len(CHUNKS)] for i in range(CHUNKS_A_TEST)]
    compare(three, chosen, decode, batches=-(-ROWS // sequences))
    compare(three, chosen, borders)
    compare(three, chosen, [(5, 6), (0, 90)])


def quantised(work: Work, prefixes: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """(pool, scales) with the prefixes in another type; free slots hold NaN, or have a scale that is."""
    pool = torch.full(prefixes.shape, 255, dtype=torch.uint8).view(stored)
    scales = torch.full(prefixes.shape[:5], torch.nan)
    for _, before, table in work.parts:
        position = torch.arange(before)
        blocks, slots = torch.tensor(table)[position // BLOCK], position % BLOCK
        for layer, plain in enumerate(prefixes):
            k, v = (plain[blocks, :, plane, slots] for plane in (0, 1))
            reference.write_kv(k, v, pool[layer], scales[layer], blocks, slots)
    return pool, scales


@pytest.mark.parametrize("stored", kv_quantization.DTYPES.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_quantised_kv(dtype: torch.dtype, stored: torch.dtype, tmp_path: Path) -> None:
    """A number near the middle of two stored ones may become either; all others are stored alike."""
    chosen = random.Random(11)
    path = create("tiny-qwen3", tmp_path / "model", 1, "bfloat16", overrides=shape_of(chosen))
    native, plain, exact = (
        Checked(path, precision, mode)
        for precision, mode in ((dtype, "native"), (dtype, "torch"), (torch.float32, "torch"))
    )
    for sequences, most in ((9, 1), (3, 40)):
        work, prefixes = draw(native.config, chosen, sequences, most)
        before = quantised(work, prefixes, stored)
        pools = [tuple(part.clone() for part in before) for _ in range(3)]
        hiddens = [
            checked.go_on(checked.stage.embed(work.batch.token_ids), work.batch, pool, 0, scales=scales)[1]
            for checked, (pool, scales) in zip((native, plain, exact), pools, strict=True)
        ]
        for first, (mine, theirs) in enumerate(zip(*(pool[0].view(torch.uint8) for pool in pools[:2]), strict=True)):
            # What comes into the first layer is the same to the bit, or nearly.
            assert float((mine != theirs).float().mean()) < (2e-4 if dtype is torch.float32 else 0.1 * (1 + first))
        mine_, theirs_, want = (hidden.double() for hidden in hiddens)
        error = float((mine_ - want).abs().mean() / want.abs().mean())
        own = float((theirs_ - want).abs().mean() / want.abs().mean())
        assert error <= 1.25 * own + 1e-4


@pytest.mark.parametrize("mode", ["native", "torch"])
@torch.inference_mode()
def test_rows_that_nobody_wants_are_left_out_of_the_last_layer(mode: str, checkpoint: Callable[[str], Path]) -> None:
    chosen = random.Random(5)
    checked = Checked(checkpoint("tiny-qwen3"), torch.float32, mode)
    work, prefixes = draw(checked.config, chosen, 6, 20)
    batch = work.batch
    counts = batch.query_start.diff().tolist()
    _, whole, pool = checked.run(work.batch, prefixes)
    for tails in ([0] * 6, [1] * 6, counts, [counts[0], 1, 0, counts[3], 0, 1], [min(2, count) for count in counts]):
        _, hidden, same_pool = checked.run(work.batch, prefixes, last_rows=tails)
        torch.testing.assert_close(same_pool, pool, rtol=0, atol=0, equal_nan=True)
        ends = batch.query_start.tolist()[1:]
        wanted = [row for end, tail in zip(ends, tails, strict=True) for row in range(end - tail, end)]
        torch.testing.assert_close(hidden[wanted], whole[wanted], rtol=1e-5, atol=1e-5)


class Words:
    """A watch: whether the step was given up, and the highest layer that may run."""

    def __init__(self, aborted: int, open_: int) -> None:
        self.words = array("q", (aborted, open_, False))
        self.address = self.words.buffer_info()[0]

    def stopped(self, layer: int) -> bool:
        return bool(self.words[0]) or self.words[1] < layer


@pytest.mark.parametrize("mode", ["native", "torch"])
@torch.inference_mode()
def test_a_step_stops_at_a_shut_gate_and_goes_on_from_there(mode: str, checkpoint: Callable[[str], Path]) -> None:
    chosen = random.Random(6)
    checked = Checked(checkpoint("tiny-llama"), torch.float32, mode)
    work, prefixes = draw(checked.config, chosen, 3, 20)
    _, whole, pool = checked.run(work.batch, prefixes)
    signals = Words(0, 1)
    came, hidden, part = checked.run(work.batch, prefixes, signals=signals)
    assert came == 2
    assert torch.equal(torch.isnan(part[2:]), torch.isnan(prefixes[2:]))
    signals.words[1] = 3
    came, hidden = checked.go_on(hidden, work.batch, part, 2, signals=signals)
    assert came == 4
    assert torch.equal(hidden, whole)
    torch.testing.assert_close(part, pool, rtol=0, atol=0, equal_nan=True)
    signals.words[0] = 1
    assert checked.go_on(hidden, work.batch, part, 0, signals=signals)[0] == 0


@torch.inference_mode()
def test_layer_by_layer_and_by_any_threads_the_same_bits(checkpoint: Callable[[str], Path]) -> None:
    chosen = random.Random(7)
    checked = Checked(checkpoint("tiny-qwen2"), torch.bfloat16, "native")
    work, prefixes = draw(checked.config, chosen, 5, 30)
    _, whole, pool = checked.run(work.batch, prefixes)
    torch.set_num_threads(2)
    again, batch = prefixes.clone(), work.batch
    hidden = checked.stage.embed(batch.token_ids)
    for layer in range(4):
        came, hidden = checked.stage.run(hidden, batch, again, layer, layer + 1)
        assert came == layer + 1
    assert torch.equal(hidden, whole)
    torch.testing.assert_close(again, pool, rtol=0, atol=0, equal_nan=True)


def test_what_the_native_step_does_not_take_runs_in_torch(tmp_path: Path) -> None:
    """Heads of 8 elements: told, and computed all the same."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1}
    checked = Checked(create("tiny-llama", tmp_path / "model", overrides=sizes), torch.float32, "")
    assert checked.stage.not_native == ["heads of 8 elements, no multiple of 16 up to 256"]
    work, prefixes = draw(checked.config, random.Random(8), 2, 3)
    assert torch.isfinite(checked.run(work.batch, prefixes)[1]).all()
