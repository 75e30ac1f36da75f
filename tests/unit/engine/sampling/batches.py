"""Batches in which each row asks for something else."""

import random
from array import array
from typing import Any

import torch
from torch import Tensor

from moonpool.base.sampling_params import SampleSpec, SamplingParams


def some_params(chosen: random.Random, vocabulary: int) -> SamplingParams:
    """Each option by itself or with others, neutral as often as not."""

    def one_of(*values: Any) -> Any:
        return chosen.choice(values)

    return SamplingParams(
        temperature=one_of(0.0, 0.05, 0.8, 1.0, 1.7, 1e300),
        top_k=one_of(0, 0, 1, 2, 40, 300, 10**9),
        top_p=one_of(1.0, 1.0, 1e-6, 0.3, 0.95, 0.9999, 1 - 1e-16),
        min_p=one_of(0.0, 0.0, 0.02, 0.3, 1.0),
        presence_penalty=one_of(0.0, 0.7, -1.1),
        frequency_penalty=one_of(0.0, 0.3, -0.2),
        repetition_penalty=one_of(1.0, 1.3, 0.7),
        logit_bias=one_of({}, {token: chosen.uniform(-5, 5) for token in chosen.sample(range(vocabulary), 3)}),
        logprobs=one_of(None, None, 0, 1, 20),
    )


def some_logits(chosen: random.Random, rows: int, vocabulary: int) -> Tensor:
    """Flat ones, peaked ones, some with many equal values."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(chosen.randrange(1 << 30)))
    logits *= torch.tensor([chosen.choice((0.0, 0.4, 2.0, 9.0)) for _ in range(rows)])[:, None]
    for row in range(rows):
        if chosen.random() < 0.4:
            logits[row] = logits[row].bfloat16().float().round(decimals=1)
    return logits


def some_mask(chosen: random.Random, vocabulary: int) -> bytes:
    """A few tokens, about half of them, or all."""
    size = max(1, -(-vocabulary // 8) + chosen.choice((3, 0, -1)))  # a tokenizer may have more tokens, or fewer
    kind = chosen.randrange(3)
    if kind == 0:
        mask = bytearray(size)
        for token in chosen.sample(range(min(vocabulary, 8 * size)), 2):
            mask[token // 8] |= 1 << token % 8
        return bytes(mask)
    return chosen.randbytes(size) if kind == 1 else b"\xff" * size


def some_specs(
    chosen: random.Random, rows: int, vocabulary: int, samples: tuple[int, ...] = (1, 1, 5)
) -> list[SampleSpec]:
    """Of so many rows, with histories in which tokens are repeated."""
    specs = []
    for _ in range(rows):
        often = chosen.choices(range(vocabulary), k=4)
        history = array(
            "i", (chosen.choice((*often, chosen.randrange(vocabulary))) for _ in range(chosen.randrange(30)))
        )
        params = some_params(chosen, vocabulary)
        specs.append(
            SampleSpec(
                params,
                seed=chosen.getrandbits(64),
                samples=chosen.choice(samples),
                position=chosen.randrange(1000),
                history=history.tobytes() if params.penalised else None,
                prompt_tokens=chosen.randrange(len(history) + 1),
                banned=tuple(chosen.sample(range(vocabulary), 2)) if chosen.random() < 0.3 else (),
            )
        )
    return specs
