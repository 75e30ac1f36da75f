"""A plain forward pass of `transformers`: what all parity tests compare with.

A generated sequence equals the reference's greedy one exactly when each of its tokens is the reference's argmax given
the tokens before it; so one teacher-forced forward pass checks a whole answer.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from moonpool.base.checkpoint.gguf import is_gguf
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.engine.sampling.random_sampler import uniform
from moonpool.engine.sampling.sampler import sample

GAP_TOLERANCE = 1e-4
"""Greatest gap between the reference's best logit and the chosen token's at which float32 sums, rounded in another
order, may decide otherwise (architecture.md, "What always holds", 1)."""

LOGPROB_TOLERANCE = 1e-4
"""Of log probabilities, in float32."""


class Reference:
    """The checkpoint as `transformers` runs it."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, *, attention: str = "eager") -> None:
        """`path` is a folder or a GGUF file."""
        folder, file = (path.parent, path.name) if is_gguf(path) else (path, None)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=dtype, attn_implementation=attention
        )
        self.model.train(False)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], last: int = 0) -> torch.Tensor:
        """Logits at every position, or at the `last` ones, float32, [positions, vocabulary]."""
        logits: torch.Tensor = self.model(torch.tensor([list(token_ids)]), logits_to_keep=last).logits[0].float()
        return logits

    @torch.inference_mode()
    def embedding(self, token_ids: Sequence[int]) -> list[float]:
        """The last token's hidden state after the last norm, of length 1."""
        states = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states[-1]
        unit: list[float] = torch.nn.functional.normalize(states[0, -1].float(), dim=0).tolist()
        return unit

    def first_token(self, prompt: Sequence[int]) -> int:
        """The greedy token after a prompt."""
        return int(self.logits(prompt)[-1].argmax())

    def gaps(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """By how much each output token's logit falls short of the best one; 0 = it is the greedy choice."""
        rows = self.logits([*prompt, *output[:-1]], last=len(output))
        chosen = rows.gather(1, torch.tensor(list(output)).unsqueeze(1)).squeeze(1)
        gaps: list[float] = (rows.max(dim=1).values - chosen).tolist()
        return gaps

    def assert_greedy(self, prompt: Sequence[int], output: Sequence[int], tolerance: float = GAP_TOLERANCE) -> None:
        """Fails when a token is not the reference's choice; prints those that the stated tolerance excuses."""
        assert output, "no token was generated"
        for position, gap in enumerate(self.gaps(prompt, output)):
            if gap > 0:
                print(
                    f"position {position}: token {output[position]} is {gap:.2e} below the best (tolerance {tolerance})"
                )
            assert gap <= tolerance, f"position {position} of {list(output)}: {gap} below the reference's best logit"

    def misses(self, prompt: Sequence[int], output: Sequence[int], seed: int, temperature: float = 1.0) -> list[float]:
        """How far outside of each sampled token's share of the distribution the draw for its position lies; 0 = inside.

        Sampling is the inverse of the cumulative distribution at a number that belongs to (seed, sample, position).
        """
        rows = self.logits([*prompt, *output[:-1]], last=len(output)).double() / temperature
        sums = torch.softmax(rows, dim=1).cumsum(dim=1)
        missed = []
        for position, token in enumerate(output):
            drawn = uniform(seed, position)
            low = float(sums[position, token - 1]) if token else 0.0
            missed.append(max(0.0, low - drawn, drawn - float(sums[position, token])))
        return missed

    def drawn(self, prompt: Sequence[int], output: Sequence[int], how: SamplingParams, index: int = 0) -> list[int]:
        """The tokens that the sampler chooses by the reference's logits, each after the output's tokens before it."""
        rows = self.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
        sampling = SequenceSampling.of(how, len(prompt), ())
        specs = [sampling.at(array("i", [*prompt, *output[:position]]), index) for position in range(len(output))]
        chosen, *_ = sample(rows.contiguous(), [replace(spec, samples=1) for spec in specs])
        return [token for [token] in chosen]

    def assert_logprobs(self, context: Sequence[int], found: Sequence[TokenLogprobs], top: int) -> None:
        """Fails when the log probabilities of tokens that follow a context are not the reference's."""
        tokens = [each.token_id for each in found]
        rows = torch.log_softmax(self.logits([*context, *tokens[:-1]])[len(context) - 1 :], dim=-1)
        for row, scored in zip(rows, found, strict=True):
            assert abs(float(row[scored.token_id]) - scored.logprob) <= LOGPROB_TOLERANCE
            assert abs(int((row > row[scored.token_id]).sum()) + 1 - scored.rank) <= 1, "equals may be rounded apart"
            best = row.topk(top).values.tolist()
            assert max((abs(mine - each) for mine, (_, each) in zip(best, scored.top, strict=True)), default=0) <= 1e-4
            assert all(abs(float(row[token]) - value) <= LOGPROB_TOLERANCE for token, value in scored.top)


def error_of(other: Reference, exact: Reference, prompt: Sequence[int]) -> float:
    """Root mean square of the difference between two references' logits over a prompt."""
    return float((other.logits(prompt) - exact.logits(prompt)).square().mean().sqrt())
