"""A run's further steps in one call each, beside the same steps one operation at a time: the same bits."""

import ctypes
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moonpool.base.checkpoint import load_config
from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.engine.kernels.native import library
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.rope import TABLE
from moonpool.engine.models.stage import StageModel
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

BLOCK = 16
STARTS = (0, 14, 15, 31, 40)
"""Positions of the sequences' first tokens: around the borders of blocks."""
TABLES = ((7, 3, 1), (0, 2, 9), (4, 8, 5), (6, 10, 11), (12, 13, 14, 15))


class Whole:
    """A stage of all layers, with KV of some sequences."""

    def __init__(
        self,
        path: Path,
        starts: tuple[int, ...] = STARTS,
        tables: tuple[tuple[int, ...], ...] = TABLES,
        *,
        int8_head: bool = False,
    ) -> None:
        self.config = config = load_config(path)
        self.stage: StageModel = load_stage(
            path, config, torch.bfloat16, 0, config.num_layers, kept=KeptWeights(int8_head=int8_head)
        )
        blocks = 1 + max(map(max, tables))
        shape = (config.num_layers, blocks, config.num_kv_heads, 2, BLOCK, config.head_dim)
        self.pool = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.chosen = array("i", range(5, 5 + len(starts)))
        parts = [(array("i", [9]).tobytes(), start, table) for start, table in zip(starts, tables, strict=True)]
        self.batch = PackedBatch.build(parts, BLOCK)
        self.stage.forward(self.batch.token_ids, self.batch, self.pool)

    def one_by_one(self) -> Tensor:
        """Logits of the next step, with the tokens that are chosen."""
        self.batch = self.batch.after(self.chosen.tolist())
        return self.stage.logits(self.stage.forward(self.batch.token_ids, self.batch, self.pool))

    def choose(self, logits: Tensor) -> None:
        """The highest of each, in place."""
        for row, token in enumerate(logits.argmax(-1).tolist()):
            self.chosen[row] = token


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])  # with an embedding of its own, or tied
@torch.inference_mode()
def test_the_same_bits_as_one_by_one(family: str, checkpoint: Callable[[str], Path]) -> None:
    mine, other = Whole(checkpoint(family)), Whole(checkpoint(family))
    run = mine.stage.native_run(mine.batch, mine.pool, 8, mine.chosen.buffer_info()[0])
    assert run is not None
    for _ in range(8):
        expected = other.one_by_one()
        done = run.go_on()
        assert not done.stopped
        assert torch.equal(run.logits, expected)
        assert torch.equal(mine.pool, other.pool)
        assert done.filled == other.batch.filled()
        mine.choose(run.logits)
        other.choose(expected)
    for name in ("token_ids", "positions", "context_lens", "block_ids", "offsets"):
        assert torch.equal(getattr(mine.batch, name), getattr(other.batch, name)), name
    with pytest.raises(InvalidRequest, match="sequences"):
        run.go_on()


@torch.inference_mode()
def test_behind_the_positions_whose_angles_are_kept(tmp_path: Path) -> None:
    path = create("tiny-llama", tmp_path / "long", overrides={"max_position_embeddings": 2 * TABLE})
    starts, tables = (TABLE - 2, 3), (tuple(range(TABLE // BLOCK + 1)), (TABLE // BLOCK + 1,))
    mine, other = Whole(path, starts, tables), Whole(path, starts, tables)
    run = mine.stage.native_run(mine.batch, mine.pool, 4, mine.chosen.buffer_info()[0])
    assert run is not None
    for _ in range(4):
        assert not run.go_on().stopped
        assert torch.equal(run.logits, other.one_by_one())


@torch.inference_mode()
def test_a_run_that_was_given_up_computes_no_further_step(checkpoint: Callable[[str], Path]) -> None:
    gates, whole = KVGates(), Whole(checkpoint("tiny-llama"))
    signals = gates.signals(1, gated=False)
    run = whole.stage.native_run(whole.batch, whole.pool, 8, whole.chosen.buffer_info()[0], signals=signals)
    assert run is not None
    assert run.go_on().steps == 1
    gates.abort(1)
    run.logits.fill_(torch.nan)
    assert run.go_on().stopped
    assert bool(run.logits.isnan().all())


@torch.inference_mode()
def test_a_run_keeps_what_it_watches(checkpoint: Callable[[str], Path]) -> None:
    """Native code reads the watch's memory, also where its step is done and the gates have forgotten it."""
    gates, whole = KVGates(), Whole(checkpoint("tiny-llama"))
    signals = gates.signals(1, gated=False)
    alive = weakref.ref(signals)
    run = whole.stage.native_run(whole.batch, whole.pool, 8, whole.chosen.buffer_info()[0], signals=signals)
    assert run is not None
    del signals
    gates.done(1)
    assert alive() is not None
    assert run.go_on().steps == 1
    del run
    assert alive() is None


@torch.inference_mode()
def test_tables_that_lead_out_of_the_pool_are_left_to_the_checks(checkpoint: Callable[[str], Path]) -> None:
    whole = Whole(checkpoint("tiny-llama"))
    assert whole.stage.native_run(whole.batch, whole.pool[:, :15], 8, whole.chosen.buffer_info()[0]) is None


def steps_until(ends: set[int], steps: list[list[int]]) -> int:
    """How many of these steps are taken in one call: none follows one with a token that may end an answer."""
    return next((count for count, tokens in enumerate(steps, 1) if not ends.isdisjoint(tokens)), len(steps))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_several_steps_of_one_call_choose_the_same_tokens(
    temperature: float, checkpoint: Callable[[str], Path]
) -> None:
    """It comes back behind a token that may end an answer, when results are to be told, and where the run is cut."""
    gates, path = KVGates(), checkpoint("tiny-llama")
    mine, other = Whole(path), Whole(path)
    specs = [SampleSpec(SamplingParams(temperature=temperature), seed=row) for row in range(len(STARTS))]
    samplers = [Sampler(specs, mine.config.vocab_size, torch.device("cpu"), 9) for _ in range(2)]
    for sampler in samplers:
        sampler.sample(torch.randn(len(STARTS), mine.config.vocab_size, generator=torch.Generator().manual_seed(2)))
    rows = samplers[0].native
    assert rows is not None
    address = rows.tokens_address
    assert address is not None
    signals = gates.signals(1, gated=False)
    run = mine.stage.native_run(mine.batch, mine.pool, 8, address, signals=signals)
    assert run is not None
    ctypes.memmove(other.chosen.buffer_info()[0], address, 4 * len(STARTS))
    expected = []
    for _ in range(8):
        samplers[1].advance(other.chosen.tolist())
        expected.append([token for [token] in samplers[1].sample(other.one_by_one()).tokens])
        other.chosen = array("i", expected[-1])
    ends = {expected[2][1]}
    run.sample_by(rows.attach, ends)
    assert run.samples
    found: list[list[int]] = []
    for most, until_ns, cut in ((8, 2**62, False), (2, 2**62, False), (8, 0, False), (2, 2**62, True)):
        if cut:
            gates.stop_run(1)
        at_once = 1 if cut or not until_ns else most
        wanted = steps_until(ends, expected[len(found) :][:at_once])
        done = run.go_on(most, until_ns)
        found += [tokens for tokens, _ in run.tokens(done.steps)]
        assert done.steps == wanted
    assert found == expected[: len(found)]


HIGHEST = SamplingParams(temperature=0.0)
SPECS = {
    "greedy": (SampleSpec(HIGHEST),),
    "three": (SampleSpec(HIGHEST),) * 3,
    "four": (SampleSpec(HIGHEST),) * 4,
    "drawn": (SampleSpec(SamplingParams(temperature=1.0), seed=3),),
    "banned": (SampleSpec(HIGHEST, banned=tuple(range(400))),),
    "biased": (SampleSpec(SamplingParams(temperature=0.0, logit_bias={7: 100.0})),),
    "masked": (SampleSpec(HIGHEST),),
}
BY_INT8_HEAD = ("greedy", "three")


@pytest.mark.parametrize("how", SPECS)
@torch.inference_mode()
def test_greedy_tokens_by_an_int8_head_are_the_same(how: str, checkpoint: Callable[[str], Path]) -> None:
    """Whatever else is wanted of a row takes all logits, and so do more rows."""
    specs, found = SPECS[how], {}
    for with_int8 in (False, True):
        whole = Whole(checkpoint("tiny-llama"), STARTS[: len(specs)], TABLES[: len(specs)], int8_head=with_int8)
        assert (whole.stage.int8_head is not None) is with_int8
        sampler = Sampler(specs, whole.config.vocab_size, torch.device("cpu"), 9)
        rows = sampler.native
        assert rows is not None
        address = rows.tokens_address
        assert address is not None
        rows.set_previous(whole.chosen.tolist())
        run = whole.stage.native_run(whole.batch, whole.pool, 8, address)
        assert run is not None
        run.sample_by(rows.attach, ())
        if how == "masked":
            rows.set_masks({0: memoryview(bytearray(b"\x02" * (whole.config.vocab_size // 8)))})
        run.logits.fill_(torch.nan)
        assert run.go_on(8, 2**62).steps == 8
        found[with_int8] = run.tokens(8), bool(run.logits.isnan().all())
    tokens = {with_int8: [chosen_token for chosen_token, _ in steps] for with_int8, (steps, _) in found.items()}
    assert tokens[True] == tokens[False]
    assert (found[True][1], found[False][1]) == (how in BY_INT8_HEAD, False)
