"""Flags that verbs of several modules share."""

from typing import Annotated

import typer

Address = Annotated[str, typer.Option(help="The conductor, HOST:PORT.", envvar="MOONPOOL_ADDRESS")]
