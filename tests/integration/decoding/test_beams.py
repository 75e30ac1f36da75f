"""Beam search through the running services is that of `transformers`: the same sequences with the same scores.

The decode instance takes all beams' KV away in every step, in each way; prompts end at each place in a block.
"""

import itertools
from typing import Any

import pytest
import torch

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client, GenerateResult
from tests.integration.conftest import BLOCK, tokens
from tests.integration.decoding.conftest import DecodeWith
from tests.integration.reference import Reference

TOLERANCE = 1e-4
"""Of scores, in float32."""
ANSWER = BLOCK + 3
WAYS = ("recompute", "swap")
RULES: list[tuple[float, bool | str]] = list(itertools.product((1.0, 0.0, 2.0, -0.5), (False, True, "never")))


PREEMPTING = (
    "--set",
    "preempt_every=1",
    "--set",
    "assumed_answer_tokens=4",
    "--set",
    "chunked_prefill_size=40",
    "--set",
    "blocks=40",
)


@torch.inference_mode()
def expected(
    reference: Reference, prompt: list[int], how: SamplingParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """What `transformers` finds: answers and scores, the best first."""
    settings: dict[str, Any] = {"eos_token_id": ends or None, "min_new_tokens": how.min_tokens or None}
    model: Any = reference.model
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=how.beam_width,
        num_return_sequences=how.n,
        max_new_tokens=how.max_tokens,
        length_penalty=how.length_penalty,
        early_stopping=how.early_stopping,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    answers = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        answer = row[len(prompt) :]
        end = next((index for index, token in enumerate(answer) if token in ends), len(answer) - 1)
        answers.append((answer[: end + 1], score))
    return answers


def likely_ends(reference: Reference, prompt: list[int], count: int) -> list[int]:
    """Tokens that are often likely, so that hypotheses end at different lengths."""
    rows = reference.logits([*prompt, *tokens(30, "more")])[-30:]
    found: list[int] = torch.softmax(rows, dim=1).mean(dim=0).topk(count + 2).indices[2:].tolist()
    return found


def compare(reference: Reference, prompt: list[int], how: SamplingParams, result: GenerateResult) -> list[int]:
    """Asserts that a result is the reference's; returns the lengths of its answers."""
    ends = list(how.stop_token_ids)
    wanted = expected(reference, prompt, how, ends)
    assert [choice.token_ids for choice in result.choices] == [answer for answer, _ in wanted]
    for choice, (_, score) in zip(result.choices, wanted, strict=True):
        assert choice.score == pytest.approx(score, abs=TOLERANCE)
        ended = choice.token_ids[-1] in ends
        assert choice.finish_reason == ("stop" if ended else "length")
    return [len(choice.token_ids) for choice in result.choices]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way != "recompute" else []) for way in WAYS]
)
def test_as_transformers_does_it(decode_with: DecodeWith, reference: Reference, way: str) -> None:
    """Widths, penalties and rules of stopping, at the borders of blocks, with and without tokens that end."""
    stack = decode_with(*PREEMPTING, "--set", f"preemption={way}")
    before, lengths = stack.gauge("decode-", "preemptions_total"), set[int]()
    cases = itertools.product((2, 4), (BLOCK - 1, BLOCK, 2 * BLOCK + 3), (0, 3))
    with Client(stack.address) as client:
        for (width, length, count), (penalty, early) in zip(cases, RULES, strict=True):
            prompt = tokens(length, f"{way} beams {width} {count}")
            how = SamplingParams(
                max_tokens=ANSWER,
                beam_width=width,
                n=width,
                length_penalty=penalty,
                early_stopping=early,  # type: ignore[arg-type]
                stop_token_ids=likely_ends(reference, prompt, count) if count else (),
                ignore_eos=True,
            )
            print(f"{way}: {width} beams behind {length} tokens, penalty {penalty}, early {early}, {count} ends")
            lengths.update(compare(reference, prompt, how, client.generate(token_ids=prompt, sampling=how)))
    assert stack.gauge("decode-", "preemptions_total") - before >= 6 * BLOCK
    assert (stack.gauge("decode-", "swaps_total") > 0) == (way == "swap")
    assert len(lengths) > 2, "all hypotheses have the same length"


def test_a_search_with_min_tokens_and_one_of_one_token(decode_with: DecodeWith, reference: Reference) -> None:
    """End tokens are banned at first, which makes no other likelier; and prefill's candidates may be all."""
    stack = decode_with(*PREEMPTING)
    prompt = tokens(20, "beams of few tokens")
    ends = likely_ends(reference, prompt, 3)
    with Client(stack.address) as client:
        for how in (
            SamplingParams(max_tokens=9, min_tokens=5, beam_width=3, n=3, stop_token_ids=ends, ignore_eos=True),
            SamplingParams(max_tokens=1, beam_width=3, n=2, ignore_eos=True),
            SamplingParams(max_tokens=9, beam_width=1, stop_token_ids=ends, ignore_eos=True, length_penalty=0.0),
        ):
            if how.beam_width > 1:
                compare(reference, prompt, how, client.generate(token_ids=prompt, sampling=how))
                continue
            result = client.generate(token_ids=prompt, sampling=how)
            reference.assert_greedy(prompt, result.token_ids)
            chosen = torch.log_softmax(reference.logits([*prompt, *result.token_ids])[len(prompt) - 1 : -1], dim=1)
            score = float(chosen.gather(1, torch.tensor(result.token_ids).unsqueeze(1)).sum())
            assert result.choices[0].score == pytest.approx(score, abs=TOLERANCE)
