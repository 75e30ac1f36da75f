"""deploy/Containerfile as far as our tests ask about it: its stages, what each is made from and does."""

import dataclasses
import json
import re

_INSTRUCTION = re.compile(r"^([A-Z]+)\s+(.*)$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One FROM and what follows it.

    Attributes:
        base: the image or stage that it starts from.
        instructions: (word, rest) each, in order.
    """

    name: str
    base: str
    instructions: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """What follows each instruction `word`."""
        return [rest for name, rest in self.instructions if name == word]


@dataclasses.dataclass(frozen=True)
class Containerfile:
    """The whole file; `arguments` are the ARGs before the first FROM."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def line(self, name: str) -> list[Stage]:
        """A stage and the stages that it starts from, itself first."""
        found = []
        while name in self.stages:
            found.append(self.stages[name])
            name = self.stages[name].base
        return found

    def last(self, name: str, word: str) -> str:
        """What holds for a stage where a later instruction replaces an earlier one (USER, ENTRYPOINT); "" = unset."""
        return next((given[-1] for stage in self.line(name) if (given := stage.all(word))), "")

    def entrypoint(self, name: str) -> list[str]:
        """The entry point of a stage's image."""
        words: list[str] = json.loads(self.last(name, "ENTRYPOINT") or "[]")
        return words

    def all(self, name: str, word: str) -> list[str]:
        """What follows each `word` in a stage and those that it starts from."""
        return [rest for stage in self.line(name) for rest in stage.all(word)]

    def everything(self, name: str) -> list[Stage]:
        """A stage, those that it starts from, and those that any of them copies from."""
        found: dict[str, Stage] = {}
        waiting = [name]
        while waiting:
            for stage in self.line(waiting.pop()):
                if stage.name not in found:
                    found[stage.name] = stage
                    waiting += [match[1] for rest in stage.all("COPY") if (match := re.match(r"--from=(\S+)", rest))]
        return list(found.values())


def parse(text: str) -> Containerfile:
    """Reads a container file.

    Raises:
        ValueError: a line is no instruction.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(str.strip, joined.splitlines()):
        found = _INSTRUCTION.match(line)
        if found is None:
            raise ValueError(f"no instruction: {line}")
        word, rest = found[1], found[2].strip()
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = stages[name] = Stage(name, base)
        elif current is None:
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            current.instructions.append((word, rest))
    return Containerfile(arguments, stages)
