"""Where a model's thinking ends and the answer begins, by the marks of a `ReasoningFormat`."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.answer_formats import ReasoningFormat


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next text of the thinking."""

    text: str


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
        ends = (self._format.end, *self._format.also_ends)
        at, mark = min(((at, end) for end in ends if (at := self._held.find(end)) >= 0), default=(0, ""))
        before, behind = self._held[:at], self._held[at:].removeprefix(self._format.end)
        if not mark:
            before = self._held[: len(self._held) - max(self._overlap(end) for end in ends)]
        said = before.rstrip()
        if said:
            output.append(ReasoningText(said))
            self.thought = True
        self._held = behind if mark else self._held[len(said) :]
        if mark:
            self._state = "ended"

    def _overlap(self, end: str) -> int:
        """Number of characters at the end of what is held that may begin `end`."""
        longest = min(len(self._held), len(end) - 1)
        return next((size for size in range(longest, 0, -1) if self._held.endswith(end[:size])), 0)
