"""The conductors that a command asks, as one flag names them."""

from moonpool.errors import InvalidRequest


def addresses(text: str) -> list[str]:
    """The addresses of a list with commas.

    Raises:
        InvalidRequest: it is empty, or has an empty place.
    """
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InvalidRequest("address", f"must be HOST:PORT, or several with commas between them, is {text!r}")
    return found
