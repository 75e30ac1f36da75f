"""Checks an LMDB file before LMDB maps the file, and salvages a damaged file's readable part. Blocking.

LMDB trusts the file: a changed byte in a page header, a node or the free page list may end the process (SIGSEGV), or
let a commit overwrite pages in use. The check reads the file with plain reads and walks both trees of the newest meta
page. So a damaged file is an error, and a bad sector is an error too instead of a SIGBUS.

Format of LMDB 0.9 (data version 1), 64-bit, little-endian: two meta pages; branch and leaf pages with node offsets
behind the header and nodes at the end; overflow pages for large values; a tree of free pages by transaction.
"""

import collections
import contextlib
import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moonpool.base.errors import MoonpoolError

_PAGE_SIZES = frozenset(1 << bits for bits in range(9, 17))
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _TREE = 1, 2  # flags of a node: the value is on overflow pages; the value describes a named tree
_INTEGER_KEYS = 8  # the only expected tree flag: for the free page tree
_NONE = (1 << 64) - 1  # an empty tree's root page number
_MAX_DEPTH = 32
_MAX_KEY_BYTES = 511
_HEADER = struct.Struct("<QHHHH")  # number, padding, flags, end of the offsets, begin of the nodes
_HEADER_BYTES = _HEADER.size
_NODE = struct.Struct("<HHHH")  # the value's size, or the page number below: low, high; flags; size of the key
_TREE_ROW = struct.Struct("<IHHQQQQQ")  # page size, flags, depth; branch, leaf, overflow pages; entries; root
_META_ROW = struct.Struct("<IIQQ")
_META_BYTES = _HEADER_BYTES + _META_ROW.size + 2 * _TREE_ROW.size + 16
_U64 = struct.Struct("<Q")


class DamagedDatabaseError(MoonpoolError):
    """The file is not a whole LMDB database."""


class _Node(NamedTuple):
    """A page's node: `value` in a leaf, `below` in a branch or for a value on overflow pages."""

    flags: int
    key: bytes
    value: bytes
    below: int
    size: int  # of the value


class _Tree(NamedTuple):
    page_bytes: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Pages:
    """Pages of an open file."""

    def __init__(self, fd: int, page_bytes: int) -> None:
        self._fd = fd
        self.size = page_bytes
        self.count = os.fstat(fd).st_size // page_bytes

    def read(self, number: int, count: int = 1) -> bytes:
        if number + count > self.count:
            raise DamagedDatabaseError(f"the file ends before page {number + count - 1}")
        return os.pread(self._fd, count * self.size, number * self.size)

    def nodes(self, page: bytes) -> list[_Node]:
        """Nodes of a branch or leaf page; they fill the end of the page."""
        _, _, kind, lower, upper = _HEADER.unpack_from(page)
        if not _HEADER_BYTES <= lower <= upper <= self.size or lower % 2:
            raise DamagedDatabaseError("a page has impossible bounds")
        nodes, places = list[_Node](), list[tuple[int, int]]()
        for (at,) in struct.iter_unpack("<H", page[_HEADER_BYTES:lower]):
            if not upper <= at <= self.size - _NODE.size:
                raise DamagedDatabaseError("a node lies outside its page")
            low, high, flags, key_size = _NODE.unpack_from(page, at)
            key_end = at + _NODE.size + key_size
            size, value_size = low | high << 16, 0
            if kind == _LEAF:
                value_size = 8 if flags & _BIG else size
                below = _U64.unpack_from(page, key_end)[0] if flags & _BIG and key_end + 8 <= self.size else 0
            else:
                below = size | flags << 32
            end = key_end + value_size
            if end > self.size or key_size > _MAX_KEY_BYTES:
                raise DamagedDatabaseError("a node is longer than its page")
            places.append((at, end + end % 2))
            nodes.append(_Node(flags, page[at + _NODE.size : key_end], page[key_end:end], below, size))
        expected = upper
        for at, end in sorted(places):
            if at != expected:
                raise DamagedDatabaseError("nodes overlap")
            expected = end
        if expected != self.size:
            raise DamagedDatabaseError("a page has unused bytes between its nodes")
        return nodes

    def overflow(self, node: _Node) -> tuple[int, bytes]:
        """Pages of a value on overflow pages, and the value."""
        number, _, kind, low, high = _HEADER.unpack_from(self.read(node.below))
        count, needed = low | high << 16, (_HEADER_BYTES - 1 + node.size) // self.size + 1
        if number != node.below or kind != _OVERFLOW or count < needed:
            raise DamagedDatabaseError("overflow pages do not belong to their value")
        return count, self.read(node.below, needed)[_HEADER_BYTES : _HEADER_BYTES + node.size]


class _Walk:
    """Walks one meta page's trees; each page may belong to one thing only."""

    def __init__(self, pages: _Pages, last_page: int, transaction: int) -> None:
        self.pages = pages
        self.last_page = last_page
        self.transaction = transaction
        self.seen = bytearray(last_page + 1)

    def claim(self, number: int, count: int = 1) -> None:
        if not 2 <= number <= number + count - 1 <= self.last_page:
            raise DamagedDatabaseError(f"page {number} is outside the database")
        if any(self.seen[number : number + count]):
            raise DamagedDatabaseError(f"page {number} is used twice")
        self.seen[number : number + count] = b"\1" * count

    def tree(self, tree: _Tree, flags: int) -> Iterator[tuple[_Node, bytes]]:
        """Leaf nodes of a tree with their values, in order."""
        if tree.flags != flags or tree.depth > _MAX_DEPTH or (tree.root == _NONE) != (tree.depth == 0):
            raise DamagedDatabaseError("a tree has impossible settings")
        counts = [0, 0, 0, 0]  # branch, leaf and overflow pages, entries
        last_key: bytes | None = None
        ordered = _integer_key if flags & _INTEGER_KEYS else _plain_key
        stack = [(tree.root, 1)] if tree.depth else []
        bounds: list[tuple[bytes | None, bytes | None]] = [(None, None)]
        while stack:
            number, depth = stack.pop()
            low, high = bounds.pop()
            self.claim(number)
            page = self.pages.read(number)
            own, _, kind, *_ = _HEADER.unpack_from(page)
            if own != number or kind != (_LEAF if depth == tree.depth else _BRANCH):
                raise DamagedDatabaseError(f"page {number} is another one")
            nodes = self.pages.nodes(page)
            if len(nodes) < (1 if kind == _LEAF else 2):
                raise DamagedDatabaseError(f"page {number} is empty")
            if kind == _BRANCH:
                counts[0] += 1
                keys = [low, *(ordered(node.key) for node in nodes[1:]), high]
                bounds += reversed(list(itertools.pairwise(keys)))
                stack += [(node.below, depth + 1) for node in reversed(nodes)]
                continue
            counts[1] += 1
            for node in nodes:
                key = ordered(node.key)
                if (last_key is not None and key <= last_key) or not node.key:
                    raise DamagedDatabaseError("keys are out of order")
                if (low is not None and key < low) or (high is not None and key >= high):
                    raise DamagedDatabaseError("a key is on another page than it should be")
                last_key, value = key, node.value
                if node.flags & _BIG:
                    count, value = self.pages.overflow(node)
                    self.claim(node.below, count)
                    counts[2] += count
                counts[3] += 1
                yield node, value
        if counts != [tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries]:
            raise DamagedDatabaseError("a tree has other pages than it says")

    def used(self, main: _Tree) -> Iterator[tuple[bytes, bytes]]:
        """Check the tree with all values, and the named trees inside; keys and values outside of named trees."""
        for node, value in self.tree(main, 0):
            if node.flags == _TREE and len(value) == _TREE_ROW.size:
                for below, _ in self.tree(_Tree(*_TREE_ROW.unpack(value)), 0):
                    if below.flags & ~_BIG:
                        raise DamagedDatabaseError("a value is of an impossible kind")
            elif node.flags & ~_BIG:
                raise DamagedDatabaseError("a value is of an impossible kind")
            else:
                yield node.key, value

    def free(self, free: _Tree) -> None:
        """Check the free pages: LMDB writes over them."""
        for node, value in self.tree(free, _INTEGER_KEYS):
            if node.flags & ~_BIG or len(value) < 8 or len(value) % 8 or len(node.key) != 8:
                raise DamagedDatabaseError("the free pages are of an impossible kind")
            (count,), (transaction,) = _U64.unpack_from(value), _U64.unpack(node.key)
            if count * 8 + 8 > len(value) or not 0 < transaction <= self.transaction:
                raise DamagedDatabaseError("the free pages are of an impossible kind")
            numbers = struct.unpack_from(f"<{count}Q", value, 8)
            if any(first <= two for first, two in itertools.pairwise(numbers)):
                raise DamagedDatabaseError("the free pages are out of order")
            for number in numbers:
                self.claim(number)


def _plain_key(key: bytes) -> bytes:
    return key


def _integer_key(key: bytes) -> bytes:
    return key[::-1]


def _newest_meta(fd: int) -> tuple[int, int, _Tree, _Tree]:
    """Last page, transaction, free page tree and main tree from the meta page that LMDB would take."""
    found = list[tuple[int, int, _Tree, _Tree]]()
    first = os.pread(fd, _META_BYTES, 0)
    if len(first) < _META_BYTES:
        raise DamagedDatabaseError("the file is too short for a database")
    page_bytes = _TREE_ROW.unpack_from(first, _HEADER_BYTES + _META_ROW.size)[0]
    if page_bytes not in _PAGE_SIZES:
        raise DamagedDatabaseError(f"the page size {page_bytes} is impossible")
    for number in range(2):
        data = os.pread(fd, _META_BYTES, number * page_bytes)
        if len(data) < _META_BYTES:
            raise DamagedDatabaseError("a meta page is missing")
        own, _, kind, *_ = _HEADER.unpack_from(data)
        magic, version, *_ = _META_ROW.unpack_from(data, _HEADER_BYTES)
        if (own, kind, magic, version) != (number, _META, _MAGIC, _DATA_VERSION):
            raise DamagedDatabaseError("a meta page is damaged or of another version")
        at = _HEADER_BYTES + _META_ROW.size
        trees = [_Tree(*_TREE_ROW.unpack_from(data, place)) for place in (at, at + _TREE_ROW.size)]
        last_page, transaction = struct.unpack_from("<QQ", data, at + 2 * _TREE_ROW.size)
        if trees[0].page_bytes != page_bytes:
            raise DamagedDatabaseError("the meta pages differ in the page size")
        found.append((last_page, transaction, *trees))
    return max(found, key=lambda meta: meta[1])


def check_database(folder: Path) -> None:
    """Check the structure of the database in a folder. A folder without one is fine, as is an empty file.

    Raises:
        DamagedDatabaseError: LMDB must not open the file.
        OSError: the file cannot be read.
    """
    collections.deque(read_database(folder), maxlen=0)


def read_database(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    """Check a database as `check_database` does and read it, but for named trees; keys ascend. Maps no memory."""
    try:
        file = (folder / "data.mdb").open("rb", buffering=0)
    except FileNotFoundError:
        return
    with file:
        if not (size := os.fstat(file.fileno()).st_size):
            return
        last_page, transaction, free, main = _newest_meta(file.fileno())
        # Pages behind the file's end may be free pages that were never written.
        if last_page < 1 or last_page * free.page_bytes > 2 * size + (1 << 30) or transaction >= 1 << 62:
            raise DamagedDatabaseError(f"the database has {last_page} pages in {size} bytes")
        walk = _Walk(_Pages(file.fileno(), free.page_bytes), last_page, transaction)
        yield from walk.used(main)
        walk.free(free)


def salvage_database(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values from all intact leaf pages, also from older states; the caller must tell good values from bad.

    Raises:
        OSError: the file cannot be opened.
    """
    with (folder / "data.mdb").open("rb", buffering=0) as file:
        pages = _Pages(file.fileno(), os.sysconf("SC_PAGE_SIZE"))
        for number in range(2, pages.count):
            with contextlib.suppress(DamagedDatabaseError, OSError):
                page = pages.read(number)
                if _HEADER.unpack_from(page)[2] == _LEAF:
                    yield from _leaf_values(pages, page)


def _leaf_values(pages: _Pages, page: bytes) -> Iterator[tuple[bytes, bytes]]:
    for node in pages.nodes(page):
        with contextlib.suppress(DamagedDatabaseError, OSError):
            yield node.key, pages.overflow(node)[1] if node.flags & _BIG else node.value
