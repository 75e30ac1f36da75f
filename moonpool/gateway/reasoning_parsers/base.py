"""The contract for reasoning parsers: where a model's thinking ends and the answer begins.

A model's family is a `ReasoningFormat`, an entry of `REASONING_PARSERS`; docs/extend/reasoning_parser.md lists the
steps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next text of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model family marks thinking.

    Attributes:
        begin: text before the thinking.
        end: text behind the thinking.
    """

    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends within the thinking, so that the answer begins with the thinking."""
        return prompt.rstrip().endswith(self.begin)


class ReasoningParser:
    """Splits one answer into thinking and text, while the answer arrives.

    White space around the thinking is dropped. Joined, the outputs do not depend on the pieces of the answer.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, is_open: bool) -> None:
        """Start an answer; `is_open`: the answer begins within the thinking."""
        self._format = reasoning_format
        self._state = "thinking" if is_open else "start"  # then "thinking", "ended", "text"
        self._held = ""
        self.thought = False
        """Whether some thinking was passed on."""

    def push(self, text: str) -> list[ReasoningText | str]:
        """Take the next text. Returns what is certain now."""
        self._held += text
        output: list[ReasoningText | str] = []
        if self._state == "start":
            self._find_begin()
        if self._state == "thinking":
            self._think(output)
        if self._state == "ended" and self._held.lstrip():
            self._held, self._state = self._held.lstrip(), "text"
        if self._state == "text" and self._held:
            output.append(self._held)
            self._held = ""
        return output

    def end(self) -> list[ReasoningText | str]:
        """Return what is still held back, after the last text."""
        rest, self._held = self._held, ""
        if self._state == "thinking":
            said = rest if self.thought else rest.lstrip()
            return [ReasoningText(said)] if said.strip() else []
        return [rest] if rest and self._state != "ended" else []

    def _find_begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._format.begin):
            self._held, self._state = start.removeprefix(self._format.begin), "thinking"
        elif not self._format.begin.startswith(start):
            self._state = "text"

    def _think(self, output: list[ReasoningText | str]) -> None:
        """Move thinking to `output`; white space at the end, and a possible beginning of the mark, is held."""
        if not self.thought:
            self._held = self._held.lstrip()
        before, mark, behind = self._held.partition(self._format.end)
        if not mark:
            size = len(self._held)
            overlap = next((n for n in range(min(size, len(self._format.end) - 1), 0, -1) if self._ends_with(n)), 0)
            before = self._held[: size - overlap]
        said = before.rstrip()
        if said:
            output.append(ReasoningText(said))
            self.thought = True
        self._held = behind if mark else self._held[len(said) :]
        if mark:
            self._state = "ended"

    def _ends_with(self, chars: int) -> bool:
        return self._held.endswith(self._format.end[:chars])
