"""What loads take and how fast the queue drains, measured; estimates for what comes next."""

from __future__ import annotations

# weight of a new measurement in a moving average
_WEIGHT = 0.2
# no load is for nothing
_LEAST_COST_S = 1e-3
# so many departures matter, or twice as many as may come at one moment
_DEPARTURES = 10


class Smoothed:
    """A moving average: the first measurement counts in full, each later one for a fifth."""

    __slots__ = ("_known", "_value")

    def __init__(self, guess: float) -> None:
        self._value = guess
        self._known = False

    @property
    def value(self) -> float:
        return self._value

    def add(self, measured: float) -> None:
        self._value += (_WEIGHT if self._known else 1.0) * (measured - self._value)
        self._known = True


class LoadTimes:
    """Seconds of cold loads: of whole ones, and of their two parts, so that one can be told from its bytes.

    ``cost`` is in seconds: what a load of that many bytes takes of the node.
    """

    def __init__(self, guess_s: float, guess_bytes_s: float) -> None:
        self._whole = Smoothed(guess_s)
        self._install = Smoothed(guess_s)
        self._byte = Smoothed(1.0 / guess_bytes_s)

    @property
    def load_s(self) -> float:
        """From the start of a load to its serving."""
        return self._whole.value

    @property
    def install_s(self) -> float:
        """What an engine takes to install one."""
        return self._install.value

    def loaded(self, seconds: float) -> None:
        self._whole.add(seconds)

    def installed(self, seconds: float) -> None:
        self._install.add(seconds)

    def fetched(self, seconds: float, size: int) -> None:
        if size > 0:
            self._byte.add(seconds / size)

    def fetch_s(self, size: int) -> float:
        return self._byte.value * size

    def cost(self, size: int, *, resident: bool) -> float:
        return max(self._install.value + (0.0 if resident else self.fetch_s(size)), _LEAST_COST_S)


class DrainRate:
    """How fast waiting loads leave the queue while there are any: measured over such times only.

    Every ``expected_s`` is the interval to assume where nothing was measured; it counts as one measurement.
    """

    def __init__(self) -> None:
        self._left = 0.0
        self._over_s = 0.0
        # what a departure before the last one still counts for
        self._memory = 1.0 - 1.0 / _DEPARTURES
        # of the last departure, or of the moment since which something waits
        self._since: float | None = None
        self._began = False

    def interval_s(self, expected_s: float) -> float:
        """From one departure to the next."""
        return (self._over_s + expected_s) / (self._left + 1.0)

    def joined(self, now: float) -> None:
        """Something waits."""
        if self._since is None:
            self._since = now
            self._began = True

    def left(self, now: float, *, waiting: int, at_once: int = 1) -> None:
        """One left the queue, in which ``waiting`` others stay; ``at_once`` is how many may at one moment."""
        # what leaves an empty queue as it comes did not wait for anything
        if self._since is not None and not (self._began and now == self._since):
            self._memory = 1.0 - 1.0 / max(_DEPARTURES, 2 * at_once)
            self._left = self._memory * self._left + 1.0
            self._over_s = self._memory * self._over_s + now - self._since
        self._since = now if waiting else None
        self._began = False

    def given_up(self, now: float, *, waiting: int) -> None:
        """One waits no more that does not count as a departure: the time that it waited does."""
        if self._since is not None and now > self._since:
            self._over_s += now - self._since
            self._since = now
            self._began = False
        if not waiting:
            self._since = None

    def pending_interval_s(self, now: float, expected_s: float) -> float:
        """From one departure to the next; not less than what the present pause already makes likely."""
        # a pause longer than usual is a measurement that has not ended
        over_s = self._memory * self._over_s + self._elapsed(now) + expected_s
        return max(self.interval_s(expected_s), over_s / (self._memory * self._left + 2.0))

    def until(self, departures: float, now: float, expected_s: float) -> float:
        """Seconds until that many more will have left."""
        interval = self.pending_interval_s(now, expected_s)
        return max(departures * interval - self._elapsed(now), interval / 2.0)

    def _elapsed(self, now: float) -> float:
        return now - self._since if self._since is not None else 0.0
