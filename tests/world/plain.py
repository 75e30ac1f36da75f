"""What a checkpoint answers without services, batches, caches and runs, and a judge of answers by that."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.grammar import Grammar
from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.base.kv.pool import KVPool
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.client import Message
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.platforms.cpu import CpuKVMemory
from moonpool.engine.sampling.sampler import sample
from moonpool.engine.structured_output import MaskBuilder, MaskRequest
from tests.world.engine import tokenizer_of

BLOCK = 16
GAP = 2e-4
"""Float32 sums that are rounded in another order may choose between tokens whose logits differ by less."""
DRAW = 2e-4
"""The same of shares of the distribution, for tokens that are drawn."""
LOGPROB = 1e-3


class PlainModel:
    """A checkpoint without services, batches, caches and runs: one forward pass over all tokens of a sequence."""

    def __init__(self, checkpoint: Path) -> None:
        self.config = load_config(checkpoint)
        dtype = torch.float32
        self._model = load_stage(checkpoint, self.config, dtype, 0, self.config.num_layers)
        layout = kv_layout(self.config, "float32", BLOCK, "auto")
        self._blocks = self.config.max_position_embeddings // BLOCK
        self._pool = KVPool.create(layout, self._blocks, [(0, layout.layers)])
        [part] = self._pool.parts
        self._kv = CpuKVMemory(part).kv

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int) -> torch.Tensor:
        """Logits at the last positions, float32 [last, vocabulary]."""
        blocks = range(-(-len(tokens) // BLOCK))
        batch = PackedBatch.build([(tokens_to_bytes(array("i", tokens)), 0, blocks)], BLOCK)
        hidden = self._model.forward(batch.token_ids, batch, self._kv)
        return self._model.logits(hidden[-last:])


class PlainJudge:
    """Teacher-forced: each token is judged by what the plain checkpoint computes after those before it."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = PlainModel(checkpoint)
        config = self._model.config
        self._ends = config.eos_token_ids
        self._masks = MaskBuilder(lambda: tokenizer_of(str(checkpoint)), config.vocab_size, self._ends)

    def wrong(self, prompt: Sequence[int], output: Sequence[int], how: SamplingParams, index: int = 0) -> str:
        if not output:
            return ""
        rows = self._model.logits([*prompt, *output[:-1]], len(output))
        sampling = SequenceSampling.of(how, len(prompt), self._ends)
        befores = [array("i", [*prompt, *output[:position]]) for position in range(len(output))]
        specs = [replace(sampling.at(before, index), samples=1, best=0) for before in befores]
        masks = {}
        for position in range(len(output)) if how.response_format else ():
            mask = self._mask(how, output[:position])
            if mask is None:
                return f"no token may follow the first {position}"
            masks[position] = mask
        chosen = [tokens[0] for tokens in sample(rows.clone().contiguous(), specs, masks).tokens]
        for position, (token, wanted) in enumerate(zip(output, chosen, strict=True)):
            if token != wanted and not self._near(rows[position].clone(), specs[position], masks.get(position), token):
                return f"token {token} at position {position} of {len(output)} should be {wanted}"
        return ""

    def _near(self, row: torch.Tensor, spec: SampleSpec, mask: memoryview | None, token: int) -> bool:
        """Whether a token is chosen after a change of its logit that rounding may explain."""
        greedy = spec.params.temperature == 0
        share = float(torch.softmax(row / (1.0 if greedy else spec.params.temperature), 0)[token])
        row[token] += GAP if greedy else math.log1p(DRAW / max(share, 1e-9))
        return sample(row.unsqueeze(0).contiguous(), [spec], {} if mask is None else {0: mask}).tokens[0][0] == token

    def _mask(self, how: SamplingParams, output: Sequence[int]) -> memoryview | None:
        grammar = Grammar.of(how)
        assert grammar is not None
        pending = self._masks.begin([MaskRequest(0, grammar, array("i", output).tobytes())])
        assert pending is not None
        made = pending.now()
        return None if 0 not in made.masks else memoryview(bytes(made.masks[0]))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int] | None:
        tokens = list[int]()
        for _ in range(count):
            best = self._model.logits([*prompt, *tokens], 1)[0].topk(2)
            if float(best.values[0] - best.values[1]) < GAP:
                return None
            tokens.append(int(best.indices[0]))
            if tokens[-1] in self._ends:
                break
        return tokens

    def picture_prompt(self, chat: Sequence[Message]) -> list[int]:
        raise AssertionError("this checkpoint sees no pictures")

    def wrong_logprobs(self, context: Sequence[int], found: Sequence[TokenLogprobs]) -> str:
        if not found:
            return ""
        tokens = [each.token_id for each in found]
        rows = torch.log_softmax(self._model.logits([*context, *tokens[:-1]], len(tokens)), dim=-1)
        for position, (row, value) in enumerate(zip(rows, found, strict=True)):
            pairs = [(value.token_id, value.logprob), *value.top]
            off = max(abs(float(row[token]) - logprob) for token, logprob in pairs)
            if off > LOGPROB:
                return f"log probabilities at position {position} are off by {off:.3g}"
        return ""

    def wrong_score(self, prompt: Sequence[int], output: Sequence[int], score: float) -> str:
        rows = torch.log_softmax(self._model.logits([*prompt, *output[:-1]], len(output)), dim=-1)
        right = float(rows.gather(1, torch.tensor(list(output)).unsqueeze(1)).sum()) / len(output)
        return "" if abs(score - right) <= LOGPROB else f"a hypothesis' score is {score:.6g}, not {right:.6g}"
