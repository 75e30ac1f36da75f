"""Regular expressions as ECMAScript reads them, written for the library that follows them.

JSON Schema's patterns are ECMAScript's, and clients mean the same in a `regex`. The library reads classes of digits,
of word characters and of spaces as all of Unicode; ECMAScript has ASCII digits, ASCII words, and a list of spaces.
"""

from __future__ import annotations

import re

_SPACES = r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
"""Characters of the classes. Their negations have capital letters."""
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_FLAGS = re.compile(r"\(\?[a-zA-Z]*-?[a-zA-Z]*[:)]")
_PIECE = re.compile(
    r"""
    \\u\{[0-9A-Fa-f]+\} | \\u[0-9A-Fa-f]{4} | \\x[0-9A-Fa-f]{2} | \\c[A-Za-z] | \\[pP]\{[^}]*\} | \\. | .
    """,
    re.VERBOSE | re.DOTALL,
)
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def from_ecma(pattern: str) -> str:
    """Return the expression in the library's notation. What is no expression stays none.

    An expression with flags of its own, as `(?s)`, is none of ECMAScript's: its dots are left as they are.
    """
    pieces = _PIECE.findall(_SURROGATES.sub(_joined, pattern))
    dot = "." if any(found.group() != "(?:" for found in _FLAGS.finditer(pattern)) else _DOT
    written: list[str] = []
    at = 0
    while at < len(pieces):
        piece = pieces[at]
        if piece == "[":
            text, at = _class(pieces, at + 1)
            written.append(text)
            continue
        written.append(dot if piece == "." else _escape(piece))
        at += 1
    return "".join(written)


def _class(pieces: list[str], at: int) -> tuple[str, int]:
    """Return the class whose bracket opens before `at`, and the index behind the class."""
    negated = at < len(pieces) and pieces[at] == "^"
    at += negated
    if at < len(pieces) and pieces[at] == "]":  # "[]" matches nothing, "[^]" everything
        return (r"[\s\S]" if negated else r"[^\s\S]"), at + 1
    end = next((index for index in range(at, len(pieces)) if pieces[index] == "]"), None)
    if end is None:
        return "[", at  # unclosed: no expression
    members: list[str] = []
    while at < end:
        begins_range = at + 2 < end and pieces[at + 1] == "-"
        if begins_range and not (_is_class(pieces[at]) or _is_class(pieces[at + 2])):
            members.append(f"{_member(pieces[at])}-{_member(pieces[at + 2])}")
            at += 3
        else:
            members.append(_member(pieces[at]))
            at += 1
    return f"[{'^' if negated else ''}{''.join(members)}]", end + 1


def _member(piece: str) -> str:
    """Return a character or class within a class. The library has operators there, and classes within classes."""
    if piece == r"\b":
        return r"\x08"
    return "\\" + piece if piece in "[&~^-" else _escape(piece)


def _is_class(piece: str) -> bool:
    return len(piece) > 1 and piece[1] in "dwsDWSpP"


def _escape(piece: str) -> str:
    """Return an escape, or another piece, in the library's notation."""
    if len(piece) < 2:
        return piece
    letter = piece[1]
    if letter.lower() in _CLASSES:
        return f"[{'^' if letter.isupper() else ''}{_CLASSES[letter.lower()]}]"
    if letter == "u":
        return rf"\x{{{piece[2:].strip('{}')}}}" if len(piece) > 2 else piece
    if letter == "c" and len(piece) > 2:
        return rf"\x{ord(piece[2]) % 32:02X}"
    return r"\x00" if letter == "0" else piece


def _joined(found: re.Match[str]) -> str:
    """A character beyond 16 bits, which ECMAScript may write as two."""
    high, low = int(found[1], 16), int(found[2], 16)
    return rf"\u{{{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):X}}}"
