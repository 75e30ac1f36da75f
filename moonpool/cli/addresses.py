"""Which conductors a verb asks: those that the user names, or those of a stack that runs."""

from moonpool.base.errors import InvalidRequest


def addresses(text: str) -> list[str]:
    """Split a list of addresses with commas; a text without a port is a stack's name, "" the one stack that runs.

    Raises:
        InvalidRequest: the list has an empty place, or no stack, or more than one stack, is meant.
    """
    if ":" not in text:
        from moonpool.cli.running_stacks import found_address

        text = found_address(text.strip())
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InvalidRequest("address", f"must be HOST:PORT, or several with commas between them, is {text!r}")
    return found
