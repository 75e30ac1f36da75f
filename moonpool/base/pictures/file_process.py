"""The process that decodes pictures of strangers, with bounded memory and time: `python -m ...file_process`.

Reads files from its input, each behind its length (8 bytes, little-endian). Each answer is a line of JSON:
`{"size": [width, height]}`, or `{"error": "..."}`. A file that uses up time or memory ends the process.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import struct
import sys
import warnings
from typing import TYPE_CHECKING

from moonpool.base.pictures.limits import FORMATS, MAX_PIXELS, MAX_SECONDS, MEMORY_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image

LENGTH = struct.Struct("<Q")


class RefusedPictureError(Exception):
    """A file that is no picture that may be sent; the text says why."""


def decode(content: bytes) -> Image:
    """Return a picture's pixels as RGB, turned as its EXIF data say; limits are looked at before anything is decoded.

    The same that transformers gives to its processors.

    Raises:
        RefusedPictureError: the file is not a whole picture of a format that is taken, or is too large.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # ours is looked at first
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise RefusedPictureError(f"has {width} x {height} pixels, more than {MAX_PIXELS:,} together")
            # A photo of some cameras has a smaller copy behind it, and is no film.
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise RefusedPictureError("is animated; send one frame")
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise RefusedPictureError(f"is none of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, struct.error, TypeError) as error:
        raise RefusedPictureError(f"is cut or damaged: {error}") from None


def main() -> None:
    """Answer for each file until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(head := sys.stdin.buffer.read(LENGTH.size)) == LENGTH.size:
        content = sys.stdin.buffer.read(LENGTH.unpack(head)[0])
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # its signal ends the process
        try:
            answer: dict[str, object] = {"size": decode(content).size}
        except RefusedPictureError as error:
            answer = {"error": str(error)}
        except ImportError:
            answer = {"missing": True}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
