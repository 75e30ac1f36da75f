"""Answers of `/v1/responses`: a response, and the events of a stream that makes one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moonpool.client import GenerateResult, TokenEvent, TokenLogprobs, Usage
from services.gateway.errors import Refusal
from services.gateway.forms import compact
from services.gateway.tools import Call, CallPart, Piece, Reading


class ResponseForm:
    """A response. Its output are items: a message per run of text, and calls of functions."""

    def __init__(
        self,
        model: str,
        reading: Reading,
        told: Mapping[str, Any],
        spell: Callable[[Sequence[TokenLogprobs]], Mapping[str, Any]],
    ) -> None:
        """Take what makes the answer.

        Args:
            model: its name.
            reading: finds the calls in the answer.
            told: fields that repeat the request.
            spell: makes a chat's log probabilities.
        """
        self._spell = spell
        self._new_scores: list[TokenLogprobs] = []  # not told yet
        self._scores: list[dict[str, Any]] = []  # of the message that goes on
        self._model = model
        self._reading = reading
        self._told = told
        self._request_id = ""
        self._head: dict[str, Any] = {}
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._text: list[str] | None = None  # of the message that goes on; it is not among the items yet
        self._call: Call | None = None  # that goes on, with its arguments so far; neither is it

    def begin(self, request_id: str, *, emulated: bool) -> None:
        self._reading.begin(request_id)
        self._request_id = request_id
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model,
            **self._told,
            **({"emulated": True} if emulated else {}),
        }

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        pieces = self._reading.whole(result.text, 0)
        self._scores = self._spelled(result.logprobs)
        output = [self._item(number, piece, "completed") for number, piece in enumerate(pieces)]
        return self._response(output, result)

    def opening(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._object("in_progress", []))

    def piece(self, text: str, choice: int) -> bytes:
        return b"".join(map(self._piece, self._reading.push(text, choice)))

    def note(self, event: TokenEvent) -> None:
        self._new_scores += event.logprobs

    def _spelled(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._spell(logprobs)["content"] if logprobs else []
        return found

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        yield from map(self._piece, self._reading.end(0))
        yield self._end_text() + self._end_call("incomplete" if result.finish_reason == "length" else "completed")
        response = self._response(self._items, result)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, refused: Refusal) -> bytes:
        error = {"code": "server_error", "message": refused.message}
        return self._event("response.failed", response={**self._object("failed", self._items), "error": error})

    def refused(self, refused: Refusal) -> dict[str, Any]:
        return refused.body()

    def _response(self, output: list[dict[str, Any]], result: GenerateResult) -> dict[str, Any]:
        """The response when the answer has ended."""
        cut = result.finish_reason == "length"
        whole = self._object("incomplete" if cut else "completed", output)
        whole["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return {**whole, "usage": usage(result.usage)}

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **nothing, "status": status, "output": output}

    def _item(self, number: int, piece: str | Call, status: str) -> dict[str, Any]:
        """An item of the output; `status` is "in_progress", "completed" or "incomplete"."""
        if isinstance(piece, str):
            content = [_part(piece, self._scores)] if status == "completed" else []
            message_id = f"msg_{self._request_id}_{number}"
            return {"type": "message", "id": message_id, "status": status, "role": "assistant", "content": content}
        call = {"call_id": piece.id, "name": piece.name, "arguments": piece.arguments}
        return {"type": "function_call", "id": f"fc_{self._request_id}_{number}", "status": status, **call}

    def _piece(self, piece: Piece) -> bytes:
        """The events of a piece: a text goes on with the next one, a call is an item of its own."""
        match piece:
            case str():
                before = self._end_call() + (self._begin_text() if self._text is None else b"")
                assert self._text is not None
                self._text.append(piece)
                new, self._new_scores = self._spelled(self._new_scores), []
                self._scores += new
                return before + self._of_text("response.output_text.delta", delta=piece, logprobs=new)
            case CallPart():
                return self._goes_on(piece.arguments)
        before = self._end_text() + self._end_call()
        self._call, number = replace(piece, arguments=""), len(self._items)
        item = self._item(number, self._call, "in_progress")
        started = self._event("response.output_item.added", output_index=number, item=item)
        return before + started + self._goes_on(piece.arguments)

    def _goes_on(self, arguments: str) -> bytes:
        """Further arguments of the call that goes on."""
        if self._call is None or not arguments:
            return b""
        self._call = replace(self._call, arguments=self._call.arguments + arguments)
        return self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)

    def _end_call(self, status: str = "completed") -> bytes:
        if self._call is None:
            return b""
        call, place, number = self._call, self._place(), len(self._items)
        item = self._item(number, call, status)
        self._items.append(item)
        self._call = None
        done = self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        return done + self._event("response.output_item.done", output_index=number, item=item)

    def _place(self) -> dict[str, Any]:
        """Where the call that goes on stands in the output."""
        number = len(self._items)
        return {"item_id": f"fc_{self._request_id}_{number}", "output_index": number}

    def _begin_text(self) -> bytes:
        self._text = []
        number = len(self._items)
        item = self._event(
            "response.output_item.added", output_index=number, item=self._item(number, "", "in_progress")
        )
        return item + self._of_text("response.content_part.added", part=_part("", []))

    def _end_text(self) -> bytes:
        if self._text is None:
            return b""
        text, number = "".join(self._text), len(self._items)
        self._scores += self._spelled(self._new_scores)  # of tokens that had no text, as the one that ends an answer
        self._new_scores = []
        ends = self._of_text("response.output_text.done", text=text, logprobs=self._scores)
        ends += self._of_text("response.content_part.done", part=_part(text, self._scores))
        item = self._item(number, text, "completed")
        self._items.append(item)
        self._text, self._scores = None, []
        return ends + self._event("response.output_item.done", output_index=number, item=item)

    def _of_text(self, kind: str, **content: Any) -> bytes:
        """An event of the message that goes on."""
        number = len(self._items)
        return self._event(
            kind, item_id=f"msg_{self._request_id}_{number}", output_index=number, content_index=0, **content
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        number = self._events
        self._events += 1
        return b"event: %s\ndata: %s\n\n" % (
            kind.encode(),
            compact({"type": kind, "sequence_number": number, **content}),
        )


def usage(counted: Usage) -> dict[str, Any]:
    """The usage, under this form's names."""
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
