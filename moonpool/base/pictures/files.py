"""Sizes of pictures of strangers: each file is decoded once, in a process with bounded memory and time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from dataclasses import field
from pathlib import Path

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.frozen import frozen
from moonpool.base.pictures.file_process import LENGTH, RefusedPictureError, decode
from moonpool.base.pictures.limits import DETAILS, MAX_BYTES, MAX_SECONDS

NO_PILLOW = "pictures need Pillow, which is not installed here"
WAIT_S = 60.0
"""Longest wait for an answer: the process has less time of a processor, and may wait for one."""


@frozen
class Picture:
    """A picture of a request.

    Attributes:
        content: the file.
        width: pixels, once turned as the file's EXIF data say.
        height: pixels.
        detail: how closely the model looks (`limits.DETAILS`).
        place: where the request has the picture, for errors; "" = not told.
    """

    content: bytes
    width: int
    height: int
    detail: str = ""
    place: str = field(default="", compare=False)


def own_picture(path: Path, detail: str = "") -> Picture:
    """Return the picture of one's own file, which is decoded here.

    Raises:
        InvalidRequest: the file cannot be read, or is no picture that can be taken; names the path.
        Unavailable: Pillow is not installed.
    """
    try:
        content = path.read_bytes()
        width, height = decode(content).size
    except OSError as error:
        raise InvalidRequest(str(path), f"cannot be read: {error.strerror}") from None
    except RefusedPictureError as error:
        raise InvalidRequest(str(path), f"the picture {error}") from None
    except ImportError:
        raise Unavailable(NO_PILLOW) from None
    return Picture(content, width, height, detail)


class PictureFiles:
    """Looks at files in a process of their own, one after the other. Any thread may call; calls block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, place: str, content: bytes, detail: str = "") -> Picture:
        """Return the picture of a file, which is decoded whole.

        Raises:
            InvalidRequest: the file is too large, or no picture that can be taken; names `place`.
            Unavailable: Pillow is not installed.
        """
        if detail not in DETAILS:
            raise InvalidRequest(place, f"detail must be one of {', '.join(DETAILS[1:])}, not {detail!r}")
        if len(content) > MAX_BYTES:
            raise InvalidRequest(place, f"the picture has {len(content)} bytes, at most {MAX_BYTES} are allowed")
        with self._lock:
            answer = self._answer(content)
        if "size" not in answer:
            raise InvalidRequest(place, f"the picture {answer['error']}")
        width, height = answer["size"]
        return Picture(content, width, height, detail, place)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _answer(self, content: bytes) -> dict[str, list[int]]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(WAIT_S, process.kill)
        watch.start()
        try:
            line = b""
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(LENGTH.pack(len(content)) + content)
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            watch.cancel()
        if not line.endswith(b"\n"):
            self._end()
            return {"error": f"takes more than {MAX_SECONDS:g} s or too much memory to decode"}  # type: ignore[dict-item]
        answer: dict[str, list[int]] = json.loads(line)
        if "missing" in answer:
            self._end()
            raise Unavailable(NO_PILLOW)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "moonpool.base.pictures.file_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes the pipes, and waits
                pass
            self._process = None
