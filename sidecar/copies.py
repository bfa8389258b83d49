"""Which copies the disk tier has, and which leave for a new one. Numbers only, no files."""

from __future__ import annotations

from contextlib import closing

from wire.outcomes import StorageFull

from .policies import CachePolicy


class Copies:
    """Never more than ``budget`` bytes, those included that a copy under way is going to have."""

    def __init__(self, budget: int, policy: CachePolicy) -> None:
        self.budget = budget
        self.used = 0
        self._policy = policy
        self._sizes: dict[str, int] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    def touch(self, digest: str) -> None:
        self._policy.touched(digest)

    def reserve(self, size: int, *, shortage: int = 0) -> dict[str, int]:
        """Count ``size`` bytes as used; the copies that leave for them, with their sizes, and are forgotten.

        ``shortage`` is how many bytes the disk lacks for it, whatever the budget says. Raises StorageFull, and then
        nothing leaves.
        """
        need = max(self.used + size - self.budget, shortage)
        if size > self.budget or need > sum(self._sizes.values()):
            raise StorageFull(f"there is no room for {size} bytes among the {self.used} of {self.budget} in use")
        leaving = {digest: self._sizes[digest] for digest in self._least_worth(need)}
        for digest in leaving:
            self.forget(digest)
        self.used += size
        return leaving

    def settle(self, digest: str, size: int, *, kept: bool) -> None:
        """What was reserved is a copy now, or was not needed."""
        if kept:
            self._sizes[digest] = size
            # to bring bytes again costs as much as there are of them
            self._policy.added(digest, size, float(size))
        else:
            self.used -= size

    def put_back(self, digest: str, size: int) -> None:
        """What was to leave is still there."""
        self.used += size
        self.settle(digest, size, kept=True)

    def forget(self, digest: str) -> bool:
        """Whether there was such a copy."""
        size = self._sizes.pop(digest, None)
        if size is None:
            return False
        self.used -= size
        self._policy.evicted(digest)
        return True

    def _least_worth(self, need: int) -> list[str]:
        found: list[str] = []
        if need > 0:
            with closing(self._policy.victims(lambda digest: True)) as victims:
                for digest in victims:
                    found.append(digest)
                    need -= self._sizes[digest]
                    if need <= 0:
                        break
        return found
