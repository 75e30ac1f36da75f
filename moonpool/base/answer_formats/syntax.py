"""What a row of the table of formats is made of: how a family of models writes calls and marks thinking.

Plain data. The gateway's readers (`moonpool/gateway/tool_parsers`) read answers by these forms, and write the grammars
of forced and strict calls from the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_CALL_ID = "call_{digits:.24}"
"""Form of a call's id. `digits` are hexadecimal digits, `name` is the function's name, `number` counts the calls of the
conversation from 0.
"""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks thinking.

    Attributes:
        begin: text before the thinking.
        end: text behind the thinking.
        also_ends: texts that end the thinking, too, and belong to what follows.
        names: what `--reasoning-parser` calls the form; the first is the form's own name.
        shown: texts that a chat template of a model with this form has; none = the text behind the thinking.
    """

    begin: str
    end: str
    also_ends: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    def is_in(self, chat_template: str) -> bool:
        """Whether a chat template shows this form."""
        return all(text in chat_template for text in self.shown or (self.end,))

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends within the thinking, so that the answer begins with the thinking."""
        return prompt.rstrip().endswith(self.begin.rstrip())


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects behind a mark, alone or in a list.

    For example `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Attributes:
        begins: texts of which one stands before a call or a list; the first is the family's own.
        end: text behind a call or a list; "" = none.
        listed: the family writes a list also for one call.
        name_key: member with the function's name.
        arguments_key: member with the arguments.
        first_members: members before the name, as the family writes them.
        between: text that parts two calls outside of a list.
        space: white space that the family writes around the JSON.
        spread: the family writes each member of a call on a line of its own.
        unmarked: a call that is the whole answer needs no mark. With `only_heads`, the answer begins with the name of a
            function that is offered, as the first of `heads` has the name.
        only_heads: a call has one of the forms of `heads`.
        at_start: texts that stand before calls at the start of an answer only.
        heads: further forms of a call behind `begins`: what stands before and behind the arguments. `{name}` is the
            function, `{number}` a number, `{id}` an id.
        around: marks around all calls of an answer, which are not shown.
        closers: further texts that may follow a call and are not shown.
    """

    begins: tuple[str, ...]
    end: str = ""
    listed: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    first_members: str = ""
    between: str = ""
    space: str = ""
    spread: bool = False
    unmarked: bool = False
    heads: tuple[tuple[str, str], ...] = ()
    only_heads: bool = False
    around: tuple[str, str] = ("", "")
    closers: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls in tags, a tag for each argument: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

    `{name}` and `{key}` stand for a function and a parameter. Texts are written as the family writes them, with line
    breaks; readers take any white space.

    Attributes:
        begin, end: texts around the functions of a call; "" = none.
        function, function_end: texts around a function's arguments.
        parameter, parameter_end: texts around a value.
        padded: a line break stands at both ends of a value and is no part of the value.
        bare: a function at the start of a line is a call also without `begin`.
        grouped: the family writes several functions between `begin` and `end`.
    """

    begin: str
    end: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    padded: bool = False
    bare: bool = False
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentCalls:
    """Calls as a programming language writes calls.

    For example `weather(city="Paris")`, or Gemma's `call:weather{city:<|"|>Paris<|"|>}`.

    Attributes:
        begins: texts of which one stands before the calls; the first is the family's own.
        end: text behind the calls.
        language: how values are written.
        layout: calls stand in a list, on lines, or alone between the marks.
        unmarked: an answer that begins with a list of calls needs no mark.
        json: a list of calls as JSON may stand in place of the list.
        quote: mark on both sides of a text in Gemma's language.
    """

    begins: tuple[str, ...]
    end: str
    language: Literal["python", "gemma"] = "python"
    layout: Literal["list", "lines", "alone"] = "list"
    unmarked: bool = False
    json: bool = False
    quote: str = '<|"|>'


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """Messages of several channels, of which some are thinking, some calls, and some text (gpt-oss)."""


CallSyntax = JsonCalls | TaggedCalls | ArgumentCalls | HarmonyCalls


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A family's format of answers: a row of the table.

    Attributes:
        names: what `--tool-call-parser` calls the row; the first is the row's own name, the others are vLLM's and
            older names of Moonpool's.
        models: models that write this form.
        example: a call, for the documentation.
        calls: how calls are written.
        needs: sets of texts. A chat template that has all texts of one set may be of this row.
        lacks: texts that no chat template of this row has.
        architectures: model classes of this family. They decide between rows that fit alike, and are a witness.
        reasoning: forms of thinking that the family may have; a chat template that has the marks of one has the form.
        call_id: form of a call's id.
        own_ids: regular expression of the ids that the chat template takes; other ids are rewritten in the history.
            "" = any.
        hidden: marks around the text of an answer, which are not shown.
        opens_line: an answer begins with a line break, which is not shown.
        always: answers are read by this row also if no function is offered.
    """

    names: tuple[str, ...]
    models: str
    example: str
    calls: CallSyntax
    needs: tuple[tuple[str, ...], ...]
    lacks: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    call_id: str = DEFAULT_CALL_ID
    own_ids: str = ""
    hidden: tuple[str, ...] = ()
    opens_line: bool = False
    always: bool = False
    reasoning: tuple[ReasoningFormat, ...] = ()

    @property
    def name(self) -> str:
        return self.names[0]
