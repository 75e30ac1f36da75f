"""A file layer that loses, with the power, what was not synced; in any order that a file system may choose."""

import contextlib
import random
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import lmdb

from moonpool.kvstore.ssd.files import FileLayer
from tests.unit.kvstore.faulty_files import at_once

PAGE = 4096
META_BYTES = 2 * PAGE
"""LMDB's two meta pages; the newer valid one names all others."""


class Node:
    """A file: its bytes as synced, and every page and size that it had since.

    Attributes:
        synced: bytes that survive.
        later: states of the file since, oldest first.
        wholes: states that may be left too, but as a whole only.
    """

    def __init__(self) -> None:
        self.synced = b""
        self.later: list[bytes] = []
        self.wholes: list[bytes] = []

    def left(self, chance: random.Random) -> bytes:
        """What a loss of power leaves: any size since the sync, and of each page any state since the sync."""
        if (number := chance.randrange(len(self.wholes) + 1)) < len(self.wholes):
            return self.wholes[number]
        states = [self.synced, *self.later]
        out = bytearray(len(chance.choice(states)))
        for at in range(0, len(out), PAGE):
            page = chance.choice(states)[at : min(at + PAGE, len(out))]
            out[at : at + len(page)] = page
        return bytes(out)


class Folder:
    """A folder: its names as synced, and what each was since; None for no such name."""

    def __init__(self) -> None:
        self.synced: dict[str, Node | Folder] = {}
        self.live: dict[str, Node | Folder] = {}
        self.later: dict[str, list[Node | Folder | None]] = {}

    def set(self, name: str, entry: "Node | Folder | None") -> None:
        self.later.setdefault(name, []).append(entry)
        if entry is None:
            self.live.pop(name, None)
        else:
            self.live[name] = entry

    def sync(self) -> None:
        self.synced = dict(self.live)
        self.later.clear()

    def left(self, chance: random.Random) -> dict[str, "Node | Folder"]:
        """What a loss of power leaves: of each name any state since the sync."""
        found = dict(self.synced)
        for name, entries in self.later.items():
            entry = chance.choice([self.synced.get(name), *entries])
            found.pop(name, None)
            if entry is not None:
                found[name] = entry
        return found


class PowerFiles(FileLayer):
    """Records writes, cuts, removals, new names and syncs below `root`; `lose_power` leaves what may be left.

    Files are the real ones, which hold what the page cache would; nothing is really synced. What LMDB writes is not
    seen here: it is opened without syncs, and its file is copied where it would sync. With syncs a transaction has two
    of them: the data pages first, the meta page that names them after. So a loss during a commit leaves the old meta
    pages and any of the new pages, which LMDB never writes over old ones in use, or all of the commit; a loss after it
    leaves all of it. Without syncs a loss leaves any mixture of old and new pages, meta pages too.

    Attributes:
        boot: what `boot_id` answers.
        full: there is no room for an index.

    Args:
        root: the data folder; it is there, and its name is synced.
        on_step: called before each change; it may raise, and so end the process there.
        boot: see `boot_id`.
        without: names of syncs ("sync", "sync_folder", "index_sync") that do nothing: a device that lies.
    """

    def __init__(
        self,
        root: Path,
        on_step: Callable[[str], None] = lambda name: None,
        *,
        boot: str = "1",
        without: Container[str] = (),
    ) -> None:
        super().__init__()
        self.boot = boot
        self.full = False
        self._without = without
        self._root = root
        self._on_step = on_step
        self._tree = Folder()
        self._index_syncs = False
        self._index_path = root / "index" / "data.mdb"

    def _folder(self, path: Path) -> Folder:
        folder = self._tree
        for part in path.relative_to(self._root).parts:
            found = folder.live[part]
            assert isinstance(found, Folder)
            folder = found
        return folder

    def _node(self, path: Path) -> Node:
        folder = self._folder(path.parent)
        if path.name not in folder.live:
            folder.set(path.name, Node())
        node = folder.live[path.name]
        assert isinstance(node, Node)
        return node

    def _changed(self, path: Path) -> None:
        self._node(path).later.append(path.read_bytes())

    def _synced(self, path: Path) -> None:
        node = self._node(path)
        node.synced, node.later, node.wholes = path.read_bytes(), [], []

    # Files

    def write(self, path: Path, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
        self._on_step("write")
        super().write(path, parts, offset)
        self._changed(path)

    def flush(self, fd: int, path: Path) -> None:
        name = "sync_folder" if path.is_dir() else "sync"
        self._on_step(name)
        if name in self._without:
            return
        if path.is_dir():
            self._folder(path).sync()
        else:
            self._synced(path)

    def truncate(self, path: Path, size: int) -> None:
        self._on_step("truncate")
        super().truncate(path, size)
        self._changed(path)

    def later(self, change: Callable[[Path], None], path: Path) -> "Future[None]":
        return at_once(change, path)

    def unlink(self, path: Path, *, readable: bool = False, durable: bool = False) -> None:
        self._on_step("unlink")
        self._folder(path.parent).set(path.name, None)
        super().unlink(path, readable=readable, durable=durable)

    def rename(self, path: Path, new: Path) -> None:
        self._on_step("rename")
        super().rename(path, new)
        node, folder = self._node(path), self._folder(path.parent)
        folder.set(path.name, None)
        folder.set(new.name, node)

    def write_note(self, path: Path, text: str) -> None:
        self._on_step("note")
        super().write_note(path, text)

    # Folders

    def make_folder(self, path: Path) -> None:
        if path != self._root and path.name not in self._folder(path.parent).live:
            self._on_step("make_folder")
            path.mkdir(exist_ok=True)
            self._folder(path.parent).set(path.name, Folder())
            self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        if path.exists():
            self._on_step("remove_folder")
            shutil.rmtree(path)
            folder = self._folder(path)
            for name in list(folder.live):
                folder.set(name, None)
            self._folder(path.parent).set(path.name, None)
            self.sync_folder(path.parent)

    def sync_all(self) -> None:
        self._on_step("sync_all")
        self._sync_below(self._root)

    def _sync_below(self, path: Path) -> None:
        folder = self._folder(path)
        folder.sync()
        for name, entry in folder.live.items():
            if isinstance(entry, Folder):
                self._sync_below(path / name)
            else:
                self._synced(path / name)

    def boot_id(self) -> str:
        return self.boot

    # The index

    def open_index(self, path: Path, map_bytes: int, *, sync: bool) -> lmdb.Environment:
        self._on_step("open_index")
        if self.full:
            raise lmdb.DiskError("No space left on device")
        self._index_syncs = sync
        env = super().open_index(path, map_bytes, sync=False)
        self._changed(self._index_path)
        return env

    @contextlib.contextmanager
    def transaction(self, env: lmdb.Environment) -> Iterator[lmdb.Transaction]:
        self._on_step("transaction")
        with super().transaction(env) as txn:
            yield txn
        node = self._node(self._index_path)
        if not self._index_syncs:
            self._changed(self._index_path)
            return
        new = self._index_path.read_bytes()
        node.later.append(node.synced[:META_BYTES] + new[len(node.synced[:META_BYTES]) :])
        node.wholes.append(new)
        self._on_step("index_sync")
        if "index_sync" not in self._without:
            self._synced(self._index_path)
        else:
            node.later.clear()

    def sync_index(self, env: lmdb.Environment) -> None:
        self._on_step("index_sync")
        if "index_sync" not in self._without:
            self._synced(self._index_path)

    # The loss

    def lose_power(self, chance: random.Random) -> None:
        """Puts below `root` what may be left, which is all synced from then on."""
        self._tree = self._left(self._tree, chance)
        shutil.rmtree(self._root)
        self._build(self._tree, self._root)

    def move(self, root: Path) -> None:
        """Goes on with a copy below another root: whoever had the files may have them open for ever."""
        shutil.copytree(self._root, root)
        self._root, self._index_path = root, root / "index" / "data.mdb"

    def _left(self, folder: Folder, chance: random.Random) -> Folder:
        found = Folder()
        for name, entry in folder.left(chance).items():
            if isinstance(entry, Folder):
                found.live[name] = self._left(entry, chance)
            else:
                node = found.live[name] = Node()
                node.synced = entry.left(chance)
        found.sync()
        return found

    def _build(self, folder: Folder, path: Path) -> None:
        path.mkdir()
        for name, entry in folder.live.items():
            if isinstance(entry, Folder):
                self._build(entry, path / name)
            else:
                (path / name).write_bytes(entry.synced)
