"""What is sent to measure predictions: requests of random lengths, some of which begin with an earlier prompt."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

CONTINUES = 0.3
"""Share of requests that begin with an earlier prompt."""
SPREAD = 0.6
"""Of the logarithm of a prompt's length."""
FIRST_TOKEN, TOKENS = 300, 3700
"""Prompts consist of these."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Attributes:
        prompt_tokens: median of new tokens of a prompt; `most_tokens` it has at most.
        answer_tokens: least and most tokens of an answer.
        block_size: of the stack.
        wanted: median error wanted at most.
    """

    prompt_tokens: int
    most_tokens: int
    answer_tokens: tuple[int, int]
    block_size: int
    wanted: float


REAL = Load(300, 1400, (8, 40), 64, 0.15)
EMULATED = Load(1000, 6000, (4, 16), 512, 0.10)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: seconds since its round began, its prompt and the length of its answer."""

    at: float
    prompt: Sequence[int]
    answer: int


@dataclass(slots=True)
class Requests:
    """Requests without an end; equal seeds give equal ones."""

    load: Load
    seed: int
    _random: random.Random = field(init=False)
    _prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(f"moonpool predictions {self.seed}")

    def take(self, count: int, rate: float) -> Iterator[Asked]:
        """The next ones, so many per second on the average."""
        at = 0.0
        for _ in range(count):
            yield Asked(at, self._prompt(), self._random.randint(*self.load.answer_tokens))
            at += self._random.expovariate(rate)

    def _prompt(self) -> list[int]:
        drawn = self._random
        earlier = drawn.choice(self._prompts) if self._prompts and drawn.random() < CONTINUES else []
        count = max(16, round(self.load.prompt_tokens * drawn.lognormvariate(0.0, SPREAD)))
        prompt = [*earlier, *(_token(drawn.randrange(TOKENS)) for _ in range(count))][: self.load.most_tokens]
        self._prompts.append(prompt)
        return prompt

    def alone(self, count: int) -> list[Asked]:
        """Requests of equal lengths and without anything in common, each to be sent when the one before is over."""
        prompts = [
            [_token(self._random.randrange(TOKENS)) for _ in range(self.load.prompt_tokens)] for _ in range(count)
        ]
        return [Asked(0.0, prompt, self.load.answer_tokens[1]) for prompt in prompts]


def again(asked: Sequence[Asked]) -> list[Asked]:
    """The same requests at the same times with other tokens: what began alike still does, and nothing is cached."""
    return [replace(it, prompt=[_token(token - FIRST_TOKEN + 1) for token in it.prompt]) for it in asked]


def _token(number: int) -> int:
    return FIRST_TOKEN + number % TOKENS
