"""Placement policies of tests: a request's tenant names the instances that serve it, as "prefill-1.decode-0"."""

from collections.abc import Sequence

from moonpool.conductor.placement.base import Candidates, DecodeCandidates, DecodeChoice, PrefillChoice


class NamedPrefill:
    """The prefill instance that is named first."""

    stores = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """The one, and no other."""
        del limit
        name = candidates.request.tenant.partition(".")[0]
        return [candidates.predict(instance) for instance in candidates if instance.name == name]


class NamedDecode:
    """The decode instance that is named second."""

    def order(self, candidates: DecodeCandidates, limit: int) -> Sequence[DecodeChoice]:
        """As `NamedPrefill`."""
        del limit
        name = candidates.request.tenant.partition(".")[2]
        return [candidates.predict(instance) for instance in candidates if instance.name == name]
