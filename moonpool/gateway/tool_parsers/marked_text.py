"""Text with calls behind marks: what every form of calls but gpt-oss's has in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.gateway.tool_parsers.base import CallReader, ParserOutput, ToolParser, marker_overlap

_FENCE = "```"
_FEW = 2
"""Characters of a mark that may as well be text."""


@dataclass(frozen=True, slots=True)
class Openings:
    """What may begin a call, and what is not shown.

    Attributes:
        reader: returns the reader of what begins with a mark.
        marks: texts that begin a call everywhere.
        line_marks: texts that begin a call at the start of a line, outside of a block of code.
        first_marks: texts that begin a call at the start of the answer only.
        hidden: texts that are not shown.
        closers: texts that are not shown behind a call.
        opens_line: white space at the start of the answer is not shown.
    """

    reader: Callable[[str], CallReader]
    marks: Sequence[str] = ()
    line_marks: Sequence[str] = ()
    first_marks: Sequence[str] = ()
    hidden: Sequence[str] = ()
    closers: Sequence[str] = ()
    opens_line: bool = False

    def without_calls(self) -> Openings:
        """For answers that may not call."""
        return Openings(self.reader, hidden=self.hidden, opens_line=self.opens_line)


class MarkedTextParser(ToolParser):
    """Passes text on, and calls to their reader.

    White space that parts text from a call is shown only if more text follows.
    """

    def __init__(self, openings: Openings) -> None:
        """Start an answer."""
        self._openings = openings
        self._held = ""  # text that may hold a mark
        self._call: CallReader | None = None
        self._space = ""  # white space behind the last text, not shown yet
        self._said = False  # some text has been shown
        self._called = openings.opens_line  # a call, or what is not shown, has come since the last text
        self._parted = openings.opens_line  # white space stands before that call, or nothing does
        self._fenced = False  # within a block of code
        self._ticks = ""  # ticks at the end of the text

    def push(self, text: str) -> list[ParserOutput]:
        output: list[ParserOutput] = []
        if self._call is not None:
            self._take(self._call.push(text), output)
        else:
            self._held += text
        while self._call_ended() or (self._call is None and self._step(output)):
            pass
        return output

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        output: list[ParserOutput] = []
        if self._call is not None:
            self._take(parts := self._call.end(is_cut=is_cut), output)
            if not parts:
                self._part()
            rest, self._call = self._call.rest, None
            if rest:
                return [*output, *self.push(rest), *self.end(is_cut=is_cut)]
        held, self._held = self._held, ""
        if is_cut and (begun := max((marker_overlap(held, mark) for mark in self._all_marks()), default=0)) > _FEW:
            held = held[:-begun]
        if not self._is_closing(held.strip()):
            self._say(held, output)
        if self._space and not self._called:
            output.append(self._space)
        self._space = ""
        return output

    def _call_ended(self) -> bool:
        """Go back to text behind a call that has ended. Returns whether there was one."""
        if self._call is None or self._call.rest is None:
            return False
        self._held, self._call = self._call.rest, None
        return True

    def _is_closing(self, text: str) -> bool:
        """Whether a text may be the beginning of what is not shown behind a call."""
        return self._called and any(closer.startswith(text) for closer in self._openings.closers)

    def _step(self, output: list[ParserOutput]) -> bool:
        """Move what is certain to `output`. Returns whether there may be more."""
        stripped = self._held.lstrip()
        if self._called:
            for closer in self._openings.closers:
                if stripped.startswith(closer):
                    self._held = stripped.removeprefix(closer)
                    return True
        if not self._said and stripped:
            for mark in self._openings.first_marks:
                if stripped.startswith(mark):
                    self._begin(len(self._held) - len(stripped), mark, output)
                    return True
        at, mark = self._next_mark()
        if mark:
            if mark in self._openings.hidden:
                self._say(self._held[:at], output)
                self._held = self._held[at + len(mark) :]
                self._part()
            else:
                self._begin(at, mark, output)
            return True
        self._show_certain(stripped, output)
        return False

    def _show_certain(self, stripped: str, output: list[ParserOutput]) -> None:
        """Show what can be no part of a mark."""
        if self._is_closing(stripped):
            return
        if not self._said and any(mark.startswith(stripped) for mark in self._openings.first_marks):
            return
        certain = len(self._held) - max((marker_overlap(self._held, mark) for mark in self._all_marks()), default=0)
        text, self._held = self._held[:certain], self._held[certain:]
        self._say(text, output)

    def _next_mark(self) -> tuple[int, str]:
        """Place and text of the first mark; an empty text if there is none."""
        found = [(at, -len(mark), mark) for mark in self._marks() if (at := self._held.find(mark)) >= 0]
        for mark in self._openings.line_marks:
            at = self._held.find(mark)
            while at >= 0:
                if self._begins_line(self._held[:at]):
                    found.append((at, -len(mark), mark))
                    break
                at = self._held.find(mark, at + 1)
        at, _, mark = min(found, default=(0, 0, ""))
        return at, mark

    def _marks(self) -> Sequence[str]:
        return (*self._openings.marks, *self._openings.hidden)

    def _all_marks(self) -> Sequence[str]:
        return (*self._openings.marks, *self._openings.line_marks, *self._openings.hidden)

    def _begins_line(self, before: str) -> bool:
        """Whether what follows `before` stands at the start of a line, outside of a block of code."""
        if self._fenced != bool((self._ticks + before).count(_FENCE) % 2):
            return False
        line = f"{self._space}{before}"
        indent = line[line.rfind("\n") + 1 :]
        return not indent.strip() and ("\n" in line or not self._said or self._called)

    def _begin(self, at: int, mark: str, output: list[ParserOutput]) -> None:
        """Begin a call at a place."""
        self._say(self._held[:at], output)
        self._call = self._openings.reader(mark)
        text, self._held = self._held[at:], ""
        self._take(self._call.push(text), output)

    def _take(self, parts: Sequence[ParserOutput], output: list[ParserOutput]) -> None:
        for part in parts:
            if isinstance(part, str):
                self._say(part, output)
                continue
            self._part()
            output.append(part)

    def _part(self) -> None:
        """Note a call, or a mark that is not shown, behind the text."""
        if not self._said:
            self._space = ""
        if not self._called:
            self._called, self._parted = True, bool(self._space) or not self._said

    def _say(self, text: str, output: list[ParserOutput]) -> None:
        if self._called and self._parted:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            output.append(f"{self._space}{shown}")
            self._said, self._called, self._space = True, False, ""
            ticked = re.split(_FENCE, self._ticks + shown)
            self._fenced ^= len(ticked) % 2 == 0
            self._ticks = "`" * (len(ticked[-1]) - len(ticked[-1].rstrip("`")))
        self._space += text[len(shown) :]
