"""What several verbs have in common: options, and the conductors that one of them names."""

from typing import Annotated

import typer

from moonpool.errors import InvalidRequest

Address = Annotated[
    str,
    typer.Option(help="The conductor, HOST:PORT; several with commas between them.", envvar="MOONPOOL_ADDRESS"),
]
Model = Annotated[
    str, typer.Option(help="Hugging Face folder, GGUF file, hub id, or smollm2 (fetched once); empty = the bundled one")
]
UsedContext = Annotated[str, typer.Option("--context", help="Id or tag of a context that goes before the prompt.")]
UsedContextTtl = Annotated[
    float, typer.Option("--context-ttl-s", min=0.0, help="Seconds that the context lives from now on; 0 = as it was.")
]
KVDtype = Annotated[str, typer.Option(help="Element type of KV: int8, fp8, or auto, that of the weights.")]
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a verb that reads its flags itself."""


def addresses(text: str) -> list[str]:
    """The addresses of a list with commas.

    Raises:
        InvalidRequest: it is empty, or has an empty place.
    """
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InvalidRequest("address", f"must be HOST:PORT, or several with commas between them, is {text!r}")
    return found
