"""Tokens per second with and without speculation, through all services: `python -m benchmarks.speculation`.

Two stacks side by side, one with `--speculative` and one without, get the same requests in turns: greedy answers that
repeat their prompt (a code edit, a summary that quotes), and drawn prose. Beside the rates stand the share of equal
tokens, and guesses checked and accepted. Sums that round differently change a choice now and then (see
`benchmarks.engine`).

`--recent` measures guesses from recent answers instead: two stacks, with and without
`suffix_decoding_max_cached_tokens`, get a file that is edited again and again, and eight samples of one prompt.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import sub
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
WITHOUT, WITHOUT_RECENT = "without speculation", "without recent answers"
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


EDITS = "Purse for Account", "balance for amount", "payment for value", "log for history"
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Text:
    """Answers that are asked for.

    Attributes:
        prompts: one for each place in the largest batch, in turn.
        sampling: how tokens are chosen; the seed is the place's and the run's.
        target: wanted rate, beside the rate without speculation.
        together: prompts are sent together; else one after the other.
    """

    name: str
    prompts: Sequence[str]
    sampling: SamplingParams
    target: float
    together: bool = True


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


def texts_of_others(tokens: int) -> list[Text]:
    """What is asked for with `--recent`: what other answers have said, and the own prompt has not."""
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    edits = [f"A Python file:\n\n{CODE}\nThe same file, with {what}:\n\n{CODE[:14]}" for what in EDITS]
    samples = ["Write a function in Python that parses a date.\n\ndef parse_date(text):\n"]
    found = [Text("edits, one after the other", edits, greedy, 1.0, together=False)]
    for temperature in (0.0, 0.7):
        drawn = SamplingParams(max_tokens=tokens, temperature=temperature, n=SAMPLES, ignore_eos=True)
        found.append(Text(f"n = {SAMPLES} at temperature {temperature:g}", samples, drawn, 1.0))
    return found


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
        asked = [
            client.generate(prompt=f"{number}. {prompt}", sampling=replace(text.sampling, seed=8 * number + place))
            for place, prompt in enumerate(text.prompts[:batch])
        ]
        found = await asyncio.gather(*asked) if text.together else [await each for each in asked]
        seconds = clock() - begin
    answers = [list(choice.token_ids) for result in found for choice in result.choices]
    return Answered(sum(map(len, answers)) / seconds, answers)


def guesses(address: str) -> tuple[float, float, float]:
    """Guesses that were checked and accepted so far, and those accepted from recent answers."""
    found = {reading.name: reading.value for reading in read_gauges(address)}
    names = "draft_tokens_total", "accepted_tokens_total", 'source_accepted_tokens_total{source="answers"}'
    checked, accepted, recent = (found[name] for name in names)
    return checked, accepted, recent


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    folder = cache_folder()
    model = cached_model(TRAINED, folder) if options.model == TRAINED else Path(options.model)
    if model is None:
        raise Skipped(f"{TRAINED} is not here: moonpool model fetch {TRAINED}")
    rows = []
    with tempfile.TemporaryDirectory() as data, ExitStack() as stacks:
        own, none = (options.speculative, "--set", "suffix_decoding_max_cached_tokens=0"), ("off",)
        ours, plain = (
            stacks.enter_context(LocalStack(_plan(options, str(model), Path(data, name), way))).address
            for name, way in (("ours", (options.speculative,)), ("plain", own if options.recent else none))
        )
        limit = WITHOUT_RECENT if options.recent else WITHOUT
        for text in texts_of_others(options.tokens) if options.recent else texts(options.tokens):
            for batch in (len(text.prompts),) if options.recent else options.batch:
                rows += _rows(ours, plain, text, batch, options.runs, progress, limit)
    return rows


def _plan(options: argparse.Namespace, model: str, folder: Path, way: Sequence[str]) -> StackPlan:
    return StackPlan(
        model,
        folder,
        kvstore=0,
        dtype=options.dtype,
        log_level="warning",
        extra={"decode": ["--speculative", *way]},
    )


def _rows(ours: str, plain: str, text: Text, batch: int, runs: int, progress: Progress, limit: str) -> list[Row]:
    pairs, same, before = [], [], [guesses(ours), guesses(plain)]
    for number in range(runs + 1):
        both = [asyncio.run(ask(address, text, batch, number)) for address in (ours, plain)]
        if number:  # the first one warms up
            pairs.append((both[0].rate, both[1].rate))
            same.append((100 * same_tokens(both[0].answers, both[1].answers), 100.0))
    name = f"{text.name}, batch {batch}"
    rates = "; ".join(f"{mine:.1f} and {others:.1f}" for mine, others in pairs)
    told = [_since(stack, earlier) for stack, earlier in zip((ours, plain), before, strict=True)]
    progress(f"{name}: {told[0]}; {limit}: {told[1]}; tokens/s {rates}")
    return [
        paired(name, "tokens/s", pairs, limit, target=text.target),
        paired(f"{name}: the same tokens", "%", same, "all of them"),
    ]


def _since(address: str, before: tuple[float, float, float]) -> str:
    checked, accepted, recent = map(sub, guesses(address), before)
    return f"{checked:.0f} guesses, {accepted:.0f} accepted ({recent:.0f} recent)"


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--model", default=TRAINED, help=f"a folder or GGUF file (default {TRAINED})")
    add("--dtype", default="bfloat16", help="element type of the weights (default bfloat16)")
    add("--speculative", default="auto", choices=["auto", "ngram", "suffix"], help="beside off (default auto)")
    add("--recent", action="store_true", help="with recent answers, beside the same without them")
    add("--tokens", type=int, default=128, help="of each answer (default 128)")
    add("--batch", type=int, nargs="+", default=BATCHES, help="requests sent together (default 1 8)")


if __name__ == "__main__":
    run("speculation", measure, flags=flags)
