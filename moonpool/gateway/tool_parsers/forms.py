"""Grammars of answers with calls: calls of strict functions within free text, and answers that have to call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.base.grammar import AnswerGrammar

ANY_NUMBER = "*"
"""How often more calls may follow: as often as the model likes."""
_MARK = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")


@dataclass(frozen=True, slots=True)
class CallForms:
    """How a row writes calls, as right sides of a Lark grammar.

    Attributes:
        begins: texts of which one stands before the calls.
        alone: forms of one call behind a beginning; a further call has a beginning of its own.
        groups: forms of all calls behind a beginning.
        between: form of what parts two calls with a beginning each.
        around: marks around all calls.
        opening: form of calls that are the whole answer and need no beginning; "" = none.
        begun: regular expression of how such an answer begins.
    """

    begins: Sequence[str]
    alone: Sequence[str] = ()
    groups: Sequence[str] = ()
    between: str = ""
    around: tuple[str, str] = ("", "")
    opening: str = ""
    begun: str = ""

    def hold(self, answer: AnswerGrammar) -> None:
        """Add the calls to an answer that is free text."""
        if self.opening:
            answer.open_with([self.opening], self.begun)
        for begin in self.begins:
            answer.add(begin, [*self.alone, *self.groups])
        for mark in filter(None, self.around):
            answer.pass_mark(mark)

    def forced(self, answer: AnswerGrammar, more: str) -> str:
        """The form of an answer that is one call, and as many more as `more` says."""
        if self.opening:
            return self.opening
        begin = answer.form([written(answer, begin) for begin in self.begins])
        found = [f"{begin} {group}" for group in self.groups]
        if self.alone:
            call = answer.form([f"{begin} {each}" for each in self.alone])
            before, behind = (f"{written(answer, mark)} " if mark else "" for mark in self.around)
            rest = f" ({self.between} {call}){more}" if more else ""
            found.insert(0, f"{before}{call}{rest} {behind}".strip())
        return answer.form(found)


def written(answer: AnswerGrammar, text: str) -> str:
    """A text with marks of the model's own, which may be special tokens, as a form."""
    return " ".join(answer.mark(part) for part in _MARK.split(text) if part)
