"""What clients may leave out, and what of another vendor they may send: one policy for chat, responses and messages.

docs/gateway.md has the policy as a table, "What a request may leave out or add". Null counts as absent (`Body`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar, final

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from moonpool.base.errors import InvalidRequest

MAY_BE_EMPTY = ("assistant", "tool")
"""Roles whose messages may have no content: an answer that only called, and a tool that gave nothing."""
DEFERRED = ("defer_loading",)
"""Members by which a client puts off a tool's definition. The model sees the tool from the start."""
_SERVER_TOOLS = (
    "advisor",
    "code_execution",
    "image_generation",
    "tool_search",
    "web_fetch",
    "web_search",
)
"""Tools that a vendor's servers run and that clients offer unasked, without the versions behind their names. Tools that
work on what a client gave the vendor, such as files, are asked for, and refused."""
_SERVER_PARTS = frozenset(
    (
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    )
)
"""Blocks of a message about what a vendor's servers did."""
_SERVER_ITEMS = frozenset(
    (
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    )
)
"""Items of a response about what a vendor's servers did."""


@final
class PassedOver(BaseModel):
    """A tool of a vendor's servers, or a part of a history about one: accepted, named in the warning, never shown."""

    model_config = ConfigDict(extra="allow")

    type: str

    def echoed(self) -> dict[str, Any]:
        """As the client sent it."""
        return self.model_dump()


T = TypeVar("T")
_KNOWN, _PASSED_OVER = "[known]", "[passed over]"


def _type_of(value: Any) -> str:
    """What a value says of itself; "" if that is no text."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else ""


def _tool_tag(value: Any) -> str:
    return _PASSED_OVER if _is_server_tool(_type_of(value)) else _KNOWN


def _part_tag(value: Any) -> str:
    return _PASSED_OVER if _type_of(value) in _SERVER_PARTS else _KNOWN


def _item_tag(value: Any) -> str:
    return _PASSED_OVER if _type_of(value) in _SERVER_ITEMS else _KNOWN


def _is_server_tool(kind: str) -> bool:
    return any(kind == name or kind.startswith(f"{name}_") for name in _SERVER_TOOLS)


ToolOrPassedOver = Annotated[
    Annotated[T, Tag(_KNOWN)] | Annotated[PassedOver, Tag(_PASSED_OVER)], Discriminator(_tool_tag)
]
"""A tool, or one that a vendor's servers run."""
PartOrPassedOver = Annotated[
    Annotated[T, Tag(_KNOWN)] | Annotated[PassedOver, Tag(_PASSED_OVER)], Discriminator(_part_tag)
]
"""A block of a message, or one about what a vendor's servers did."""
ItemOrPassedOver = Annotated[
    Annotated[T, Tag(_KNOWN)] | Annotated[PassedOver, Tag(_PASSED_OVER)], Discriminator(_item_tag)
]
"""An item of a response, or one about what a vendor's servers did."""


def without_nulls(value: Any) -> Any:
    """An object without its null members, which count as absent."""
    if isinstance(value, dict) and None in value.values():
        return {name: member for name, member in value.items() if member is not None}
    return value


def check_content(content: object, role: str, field: str) -> None:
    """Check that a message has content, if its role must have some.

    Raises:
        InvalidRequest: there is none; names `field`.
    """
    if content is None and role not in MAY_BE_EMPTY:
        raise InvalidRequest(field, "is missing")


def known(values: Collection[T | PassedOver] | None) -> list[tuple[int, T]]:
    """The values that are not passed over, each with its index."""
    return [(index, value) for index, value in enumerate(values or ()) if not isinstance(value, PassedOver)]
