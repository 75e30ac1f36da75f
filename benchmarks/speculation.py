"""Tokens per second with and without speculation, through all services: `python -m benchmarks.speculation`.

Two stacks side by side, one with `--speculative` and one without, get the same requests in turns: greedy answers that
repeat their prompt (a code edit, a summary that quotes), and drawn prose. Beside the rates stand the share of equal
tokens, and guesses checked and accepted. Sums that round differently change a choice now and then (see
`benchmarks.engine`).
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.engine import TRAINED, same_tokens
from benchmarks.frame import Progress, Row, Skipped, paired, run
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import read_gauges
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient

REPETITIVE_TARGET, PROSE_TARGET = 1.5, 0.97
BATCHES = (1, 8)
WITHOUT = "without speculation"
CODE = """class Account:
    def __init__(self, owner, amount=0):
        self.owner = owner
        self.amount = amount
        self.history = []

    def deposit(self, value):
        if value <= 0:
            raise ValueError("a deposit must be positive")
        self.amount += value
        self.history.append(("deposit", value))

    def withdraw(self, value):
        if value > self.amount:
            raise ValueError("there is not enough money")
        self.amount -= value
        self.history.append(("withdraw", value))

    def transfer(self, other, value):
        self.withdraw(value)
        other.deposit(value)
        self.history.append(("transfer", other.owner, value))
"""
NEWS = """\
The harbour of Lindvik was closed for three days after the storm of last Sunday. Two ferries could not leave, and
four hundred travellers slept in the sports hall of the school. "Nobody went hungry," said the mayor, Anna Berg,
"since the bakers worked through the night." The repair of the northern pier will take until spring. The insurance
pays for the pier, but not for the boats, of which eleven sank. The fishermen have asked the county for a loan
without interest. The county will decide on the first of March. "Without boats there is no fish, and without fish
there is no Lindvik," said Per Holm, who has fished here for forty years.
""".replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Text:
    """Answers that are asked for.

    Attributes:
        prompts: one for each place in the largest batch, in turn.
        sampling: how tokens are chosen; the seed is the place's and the run's.
        target: wanted rate, beside the rate without speculation.
    """

    name: str
    prompts: Sequence[str]
    sampling: SamplingParams
    target: float


def texts(tokens: int) -> list[Text]:
    """What is asked for."""
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=tokens, temperature=0.8, top_p=0.95, ignore_eos=True)
    begun = CODE.replace("Account", "Purse")[:90]
    edits = [
        f"A Python file:\n\n{CODE}\nThe same file, number {n}, with Purse for Account:\n\n{begun}" for n in range(8)
    ]
    quotes = [f"{NEWS}\n\nThe report once more, word for word, copy {n}:\n\n{NEWS[:60]}" for n in range(8)]
    about = "the sea", "a lighthouse", "bread", "the moon", "an old clock", "a train", "two sisters", "the winter"
    prose = [f"Write a story about {what}.\n\nOnce upon a time" for what in about]
    return [
        Text("a code edit", edits, greedy, REPETITIVE_TARGET),
        Text("a summary that quotes", quotes, greedy, REPETITIVE_TARGET),
        Text("prose", prose, drawn, PROSE_TARGET),
    ]


@dataclass(frozen=True, slots=True)
class Answered:
    """One round of one stack: tokens per second from the first request's start to the last one's end; answers."""

    rate: float
    answers: list[list[int]]


async def ask(address: str, text: Text, batch: int, number: int) -> Answered:
    """Ask for `batch` answers together; `number` is the round's."""
    clock = asyncio.get_running_loop().time
    async with AsyncClient(address) as client:
        await client.stats()  # connected
        begin = clock()
        found = await asyncio.gather(
            *(
                client.generate(prompt=f"{number}. {prompt}", sampling=replace(text.sampling, seed=8 * number + place))
                for place, prompt in enumerate(text.prompts[:batch])
            )
        )
        seconds = clock() - begin
    answers = [result.token_ids for result in found]
    return Answered(sum(map(len, answers)) / seconds, answers)


def guesses(address: str) -> tuple[float, float]:
    """Guesses that were checked and accepted so far."""
    found = {reading.name: reading.value for reading in read_gauges(address)}
    return found["draft_tokens_total"], found["accepted_tokens_total"]


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    folder = cache_folder()
    model = cached_model(TRAINED, folder) if options.model == TRAINED else Path(options.model)
    if model is None:
        raise Skipped(f"{TRAINED} is not here: moonpool model fetch {TRAINED}")
    rows = []
    with tempfile.TemporaryDirectory() as data, ExitStack() as stacks:
        ours, plain = (
            stacks.enter_context(LocalStack(_plan(options, str(model), Path(data), way))).address
            for way in (options.speculative, "off")
        )
        for text in texts(options.tokens):
            for batch in options.batch:
                rows += _rows(ours, plain, text, batch, options.runs, progress)
    return rows


def _plan(options: argparse.Namespace, model: str, folder: Path, way: str) -> StackPlan:
    return StackPlan(
        model,
        folder / way,
        kvstore=0,
        dtype=options.dtype,
        log_level="warning",
        extra={"decode": ["--speculative", way]},
    )


def _rows(ours: str, plain: str, text: Text, batch: int, runs: int, progress: Progress) -> list[Row]:
    pairs, same, before = [], [], guesses(ours)
    for number in range(runs + 1):
        both = [asyncio.run(ask(address, text, batch, number)) for address in (ours, plain)]
        if number:  # the first one warms up
            pairs.append((both[0].rate, both[1].rate))
            same.append((100 * same_tokens(both[0].answers, both[1].answers), 100.0))
    drafted, accepted = (after - earlier for after, earlier in zip(guesses(ours), before, strict=True))
    name = f"{text.name}, batch {batch}"
    rates = "; ".join(f"{mine:.1f} and {others:.1f}" for mine, others in pairs)
    progress(f"{name}: {drafted:.0f} guesses, {accepted:.0f} accepted; tokens/s {rates}")
    return [
        paired(name, "tokens/s", pairs, WITHOUT, target=text.target),
        paired(f"{name}: the same tokens", "%", same, "all of them"),
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--model", default=TRAINED, help=f"a folder or GGUF file (default {TRAINED})")
    add("--dtype", default="bfloat16", help="element type of the weights (default bfloat16)")
    add("--speculative", default="auto", choices=["auto", "ngram"], help="beside off (default auto)")
    add("--tokens", type=int, default=128, help="of each answer (default 128)")
    add("--batch", type=int, nargs="+", default=BATCHES, help="requests sent together (default 1 8)")


if __name__ == "__main__":
    run("speculation", measure, flags=flags)
