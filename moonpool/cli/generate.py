"""`moonpool generate`: one prompt, streamed to the terminal."""

import dataclasses
import json
import sys
from collections.abc import Sequence

import typer

from moonpool.client import Client, GenerateArguments, GenerateResult, SamplingParams, TokenLogprobs


def run_generate(conductors: Sequence[str], asked: GenerateArguments, *, as_json: bool) -> None:
    """Streams the answer to standard output and the figures to standard error, or prints one JSON object."""
    sampling = asked.get("sampling") or SamplingParams()
    with Client(conductors) as client:
        if as_json:
            answer = client.generate(**asked)
            typer.echo(json.dumps(dataclasses.asdict(answer)))
            return
        stream = client.stream(**asked)
        for event in stream:
            if _streamed(sampling):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if (result := stream.result) is not None:
        sys.stdout.write("\n" if _streamed(sampling) else _listed(result))
        sys.stdout.write(_scores("prompt", result.prompt_logprobs))
        for index, choice in enumerate(result.choices):
            sys.stdout.write(_scores(f"answer {index}", choice.logprobs))
        typer.echo(figures(result), err=True)


def _streamed(sampling: SamplingParams) -> bool:
    """Whether the text is printed as it comes: there is one answer, and it has no score."""
    return sampling.n == 1 and not sampling.beam_width


def _listed(result: GenerateResult) -> str:
    """Several answers come mixed: they are printed whole, each under its number; hypotheses with their scores."""
    texts = []
    for index, choice in enumerate(result.choices):
        score = "" if choice.score is None else f" {choice.score:.4f}"
        texts.append(f"--- {index} [{choice.finish_reason}]{score}\n{choice.text}\n")
    return "".join(texts)


def _scores(title: str, logprobs: Sequence[TokenLogprobs | None]) -> str:
    """Log probabilities, a line for each token: its id, its own, its rank, and the likely ones. "" when none came."""
    lines = [f"--- log probabilities of {title}: token, its own, rank; likely tokens with theirs"] if logprobs else []
    for its in logprobs:
        if its is not None:
            likely = "  ".join(f"{token} {value:.4f}" for token, value in its.top)
            lines.append(f"{its.token_id} {its.logprob:.4f} {its.rank}; {likely}".rstrip("; "))
    return "".join(f"{line}\n" for line in lines)


def figures(result: GenerateResult) -> str:
    """A line on an answer: why it ended, its tokens, what of its prompt came from the cache, and its speeds."""
    usage, timing = result.usage, result.timing
    speed = f" ({1 / timing.tpot_s:.1f} tokens/s)" if timing.tpot_s else ""
    return (
        f"[{result.finish_reason}] {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; "
        f"{usage.completion_tokens} generated; TTFT {timing.ttft_s:.3f} s, TPOT {timing.tpot_s:.4f} s{speed}"
        + (" (emulated)" if result.placement.emulated else "")
    )
