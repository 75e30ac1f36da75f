"""The page to look at: files of this package, served as they are. They need nothing from anywhere else."""

from __future__ import annotations

from http import HTTPStatus
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PAGE = "/"
FILES = "/page/{name}"
INDEX = "index.html"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Nothing of the page is loaded from elsewhere, sent elsewhere, or shown within another site."""


class Page:
    """The page's files, read once."""

    def __init__(self) -> None:
        folder = resources.files("services.gateway") / "static"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.count(".") == 1}

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(INDEX)

    async def file(self, request: Request) -> Response:
        """A script, a style or a picture of it.

        Raises:
            HTTPException: there is no such file.
        """
        name: str = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        kind = TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], headers=HEADERS, media_type=kind)
