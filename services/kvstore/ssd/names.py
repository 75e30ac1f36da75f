"""Which formats' and tenants' names the index must still learn, and which it may forget.

Owns that difference between the catalogue and the index. Must not know of transactions, files or threads. A name stays
for as long as a record bears it, alive or dead; so the disk bounds the names, whoever invents them.
"""

from collections.abc import Iterable

from services.kvstore.ssd.catalogue import Catalogue
from services.kvstore.ssd.index import IndexChange


class Names:
    """The names of one catalogue.

    Args:
        books: the catalogue, as it was loaded from the index.
    """

    def __init__(self, books: Catalogue) -> None:
        self._books = books
        self._known = books.formats.last, books.tenants.last  # numbers up to these were written to the index
        self._surplus: tuple[set[int], set[int]] = set(), set()  # written, and not needed any more
        self._drop_unused()

    def change(self) -> IndexChange:
        """What the next transaction should say about names."""
        return IndexChange(
            formats=self._books.formats.since(self._known[0]),
            tenants=self._books.tenants.since(self._known[1]),
            unused_formats=frozenset(self._surplus[0]),
            unused_tenants=frozenset(self._surplus[1]),
        )

    def settle(self, change: IndexChange, *, written: bool) -> Iterable[str]:
        """The plan with that change is over, and the catalogue up to date.

        Args:
            change: what `change` returned when the plan was made.
            written: whether the index has it.

        Returns:
            Tenants of whom nothing is left.
        """
        if written:
            self._known = self._books.formats.last, self._books.tenants.last
            self._surplus[0].difference_update(change.unused_formats)
            self._surplus[1].difference_update(change.unused_tenants)
        gone = self._drop_unused()
        # Names that were not written are borne by nothing now: the next change need not look through their numbers.
        assert not self._books.formats.since(self._known[0])
        assert not self._books.tenants.since(self._known[1])
        self._known = self._books.formats.last, self._books.tenants.last
        return gone

    def _drop_unused(self) -> Iterable[str]:
        formats, tenants = self._books.formats.drop_unused(), self._books.tenants.drop_unused()
        self._surplus[0].update(number for number in formats if number <= self._known[0])
        self._surplus[1].update(number for number in tenants if number <= self._known[1])
        return tenants.values()
