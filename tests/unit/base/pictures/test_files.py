"""Files of strangers: each is a picture with a size, or refused in bounded time and memory."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.pictures import files
from moonpool.base.pictures.files import PictureFiles
from moonpool.base.pictures.limits import MAX_BYTES
from tests.pictures import picture_file

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def reader() -> Iterator[PictureFiles]:
    found = PictureFiles()
    yield found
    found.close()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, data: bytes = b"", *before: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = (
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", head),
        *before,
        chunk(b"IDAT", zlib.compress(data)),
        chunk(b"IEND", b""),
    )
    return b"".join(body)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_have_their_sizes(reader: PictureFiles, kind: str) -> None:
    picture = reader.read("p", picture_file(37, 21, kind=kind), "low")
    assert (picture.width, picture.height, picture.detail) == (37, 21, "low")


def test_a_photo_is_turned_as_its_file_says(reader: PictureFiles) -> None:
    from PIL import Image

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(file, "JPEG", exif=exif)
    picture = reader.read("p", file.getvalue())
    assert (picture.width, picture.height) == (20, 40)


def animated() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")])
    return file.getvalue()


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "no picture": (lambda: b"GIF, it is not", "is none of"),
    "empty": (lambda: b"", "is none of"),
    "a page": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is none of"),
    "a bitmap": (lambda: picture_file(4, 4, kind="BMP"), "is none of"),
    "a bomb": (lambda: png_of(60_000, 60_000, bytes(1 << 20)), "60000 x 60000 pixels, more than"),
    "a bomb of text": (
        lambda: png_of(2, 2, bytes(14), chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(80 << 20)))),
        "cut or damaged",
    ),
    "cut": (lambda: picture_file(64, 64)[:-40], "cut or damaged"),
    "cut in its head": (lambda: picture_file(64, 64)[:20], ""),
    "a photo, cut": (lambda: picture_file(64, 64, kind="JPEG")[:-60], "cut or damaged"),
    "damaged": (lambda: picture_file(64, 64)[:60] + bytes(40) + picture_file(64, 64)[100:], "cut or damaged"),
    "animated": (animated, "animated"),
    "too large a file": (lambda: bytes(MAX_BYTES + 1), "bytes, at most"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused_by_name_and_the_next_file_is_read(reader: PictureFiles, what: str) -> None:
    make, why = HOSTILE[what]
    with pytest.raises(InvalidRequest) as error:
        reader.read("messages.0.content.1.image_url", make())
    assert error.value.field == "messages.0.content.1.image_url"
    assert why in error.value.message
    assert reader.read("p", picture_file(3, 2)).width == 3


def test_a_file_that_is_a_picture_and_an_archive_is_the_picture(reader: PictureFiles) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("a", b"b")
    assert reader.read("p", picture_file(5, 4) + archive.getvalue()).width == 5


def children() -> list[str]:
    """Processes that this thread has started, and that nobody has waited for."""
    return Path("/proc/thread-self/children").read_text().split()


def test_a_file_that_takes_too_long_ends_the_process_and_the_next_has_a_new_one(
    monkeypatch: pytest.MonkeyPatch, reader: PictureFiles
) -> None:
    reader.read("p", picture_file(3, 2))
    there = children()
    monkeypatch.setattr(files, "WAIT_S", 0.0)
    with pytest.raises(InvalidRequest, match="takes more than"):
        reader.read("p", picture_file(1500, 1500))
    assert len(children()) == len(there) - 1, "the process has ended, and was waited for"
    monkeypatch.undo()
    assert reader.read("p", picture_file(3, 2)).height == 2


def test_words_of_detail(reader: PictureFiles) -> None:
    with pytest.raises(InvalidRequest, match="detail must be one of"):
        reader.read("p", picture_file(3, 2), "sharp")
