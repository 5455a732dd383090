"""Plain counters, gauges, meters and histograms, in groups with hierarchical names.

An update costs an integer addition: no lock (one loop owns a metric), no clock, no label lookup.
All other work is done when metrics are read: `snapshot` samples meters and sorts histograms. Clocks
are injected, so that virtual time works.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["Counter", "Gauge", "Gauges", "Histogram", "Meter", "MetricGroup", "Number"]

logger = logging.getLogger(__name__)

Number = int | float

METER_WINDOW_S = 60.0
"""Window of a meter in seconds, as in Flink's MeterView: long enough for a steady rate, short
enough to follow a change.
"""

METER_SAMPLES_MAX = 60
"""Maximum number of samples in a meter's window."""

RESERVOIR_VALUES = 1024
"""Number of values that a histogram keeps: of a thousand values, ten still lie above the p99."""

QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


class Counter:
    """A metric that counts events."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def inc(self, n: int = 1) -> None:
        """Adds `n` to the count."""
        self.count += n

    def dec(self, n: int = 1) -> None:
        """Subtracts `n` from the count."""
        self.count -= n


class Gauge:
    """A metric whose value is computed at each read. `fn` must be quick and must not block."""

    __slots__ = ("_failed", "_fn")

    def __init__(self, fn: Callable[[], Number]) -> None:
        self._fn = fn
        self._failed = False

    def value(self) -> Number:
        """The result of `fn`, or NaN if `fn` raises or does not return a number. The first failure
        is logged.

        A broken gauge must not hide the other metrics.
        """
        try:
            value = self._fn()
            value - value  # Raises TypeError for None, a text and other kinds.
            return value
        except BaseException:  # Nothing is awaited, so even a CancelledError comes from `fn`.
            if not self._failed:
                self._failed = True
                logger.warning("gauge %r raised and is shown as NaN", self._fn, exc_info=True)
            return math.nan


class Gauges:
    """Several gauges that one function reads together, so that their common work is done once."""

    __slots__ = ("_failed", "_read", "_shown", "names")

    def __init__(self, names: Sequence[str], read: Callable[[], Sequence[Number]]) -> None:
        """Makes the gauges. `read()` returns a value for each of `names`, in their order.

        `read` must be quick and must not block.
        """
        self.names = tuple(names)
        self._read = read
        self._failed = False
        self._shown: tuple[str, tuple[str, ...]] = ("", self.names)

    def collect(self, prefix: str, values: dict[str, Number]) -> None:
        """Puts each value into `values`, under its name with `prefix` before it. All values are NaN
        if `read` raises (logged once).
        """
        if self._shown[0] != prefix:
            self._shown = prefix, tuple([prefix + name for name in self.names])
        try:
            values.update(zip(self._shown[1], self._read(), strict=True))
        except BaseException:  # Nothing is awaited, so even a CancelledError comes from `fn`.
            if not self._failed:
                self._failed = True
                logger.warning("gauges %r raised and are shown as NaN", self._read, exc_info=True)
            values.update(dict.fromkeys(self._shown[1], math.nan))


class Meter:
    """A metric for the rate of events per second, over the last `window_s`.

    The window is sampled at each read. If the last read is older than the window, the rate covers
    the time since that read.
    """

    __slots__ = ("_now", "_samples", "_window_s", "count")

    def __init__(self, now: Callable[[], float], window_s: float = METER_WINDOW_S) -> None:
        self.count = 0
        self._now = now
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque([(now(), 0)])
        """Samples (time, count), oldest first. The first sample is the start of the window."""

    def mark(self, n: int = 1) -> None:
        """Counts `n` events that happened now."""
        self.count += n

    def rate(self) -> float:
        """Returns the events per second; 0.0 before any time has passed."""
        now, samples = self._now(), self._samples
        # The youngest sample that is at least a window old starts the window.
        while len(samples) > 1 and now - samples[1][0] >= self._window_s:
            samples.popleft()
        start, count_at_start = samples[0]
        if now - samples[-1][0] >= self._window_s / METER_SAMPLES_MAX:
            samples.append((now, self.count))
        elapsed = now - start
        return (self.count - count_at_start) / elapsed if elapsed > 0 else 0.0


class Histogram:
    """A metric for the distribution of values.

    Quantiles cover the last `size` values; count, sum, min and max cover all.
    """

    __slots__ = ("_values", "count", "max", "min", "sum")

    def __init__(self, size: int = RESERVOIR_VALUES) -> None:
        self._values: deque[Number] = deque(maxlen=size)
        self.count = 0
        self.sum: Number = 0
        self.min: Number = math.inf
        self.max: Number = -math.inf

    def update(self, value: Number) -> None:
        """Adds one value."""
        self._values.append(value)
        self.count += 1
        self.sum += value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value

    def quantile(self, q: float) -> Number:
        """Returns the smallest kept value that at least a share `q` of the kept values does not
        exceed.

        Returns NaN without values.
        """
        return self.quantiles(q)[0]

    def quantiles(self, *shares: float) -> list[Number]:
        """Returns what `quantile` returns for each of the given shares, with only one sort."""
        ordered = sorted(self._values)
        if not ordered:
            return [math.nan] * len(shares)
        return [
            ordered[min(max(math.ceil(q * len(ordered)) - 1, 0), len(ordered) - 1)] for q in shares
        ]

    @property
    def mean(self) -> float:
        """Mean of all values so far; NaN without values."""
        return self.sum / self.count if self.count else math.nan


M = TypeVar("M", Counter, Gauge, Meter, Histogram)


class MetricGroup:
    """A group of metrics and further groups, by name. `now` returns monotonic seconds for the
    meters.
    """

    __slots__ = ("_gauges", "_groups", "_metrics", "_now", "name")

    def __init__(self, now: Callable[[], float], name: str = "") -> None:
        self.name = name
        self._now = now
        self._metrics: dict[str, Counter | Gauge | Meter | Histogram] = {}
        self._gauges: dict[tuple[str, ...], Gauges] = {}
        self._groups: dict[str, MetricGroup] = {}

    def counter(self, name: str) -> Counter:
        """Returns the counter `name`, created by the first call.

        Raises ValueError if the name belongs to another kind of metric.
        """
        return self._get(name, Counter, Counter)

    def gauge(self, name: str, fn: Callable[[], Number]) -> Gauge:
        """Returns a gauge that reads `fn`. A second registration of the name (a restarted task)
        replaces the gauge.
        """
        if isinstance(self._metrics.get(name), Gauge):
            del self._metrics[name]
        return self._get(name, Gauge, lambda: Gauge(fn))

    def gauges(self, names: Sequence[str], read: Callable[[], Sequence[Number]]) -> None:
        """Registers gauges that are read together.

        A second registration of the same names (a restarted task) replaces the function.
        """
        made = Gauges(names, read)
        for name in made.names:
            if name in self._metrics or any(
                name in other for other in self._gauges if other != made.names
            ):
                raise ValueError(
                    f"metric {name!r} of group {self.name!r} is there already; choose another name"
                )
        self._gauges[made.names] = made

    def meter(self, name: str) -> Meter:
        """Returns the meter `name`, made at the first call."""
        return self._get(name, Meter, lambda: Meter(self._now))

    def histogram(self, name: str) -> Histogram:
        """Returns the histogram `name`, made at the first call."""
        return self._get(name, Histogram, Histogram)

    def add_group(self, name: str) -> MetricGroup:
        """Returns the group `name` below this one, made at the first call."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = MetricGroup(self._now, name)
        return group

    def remove_group(self, name: str) -> None:
        """Removes a group with its contents. Does nothing if there is none."""
        self._groups.pop(name, None)

    def snapshot(self) -> dict[str, Number]:
        """Returns all values by dotted name, own metrics first, groups in the order of creation.

        Gauges that are read together come before the others. A counter or a gauge yields one
        number. A meter yields its rate, and its count as `.count`. A histogram yields `.count .min
        .max .mean .p50 .p95 .p99`; before its first value it yields only `.count`.
        """
        values: dict[str, Number] = {}
        self._collect("", values)
        return values

    def own_values(self) -> dict[str, Number]:
        """Returns the same as `snapshot`, without the values of subgroups."""
        values: dict[str, Number] = {}
        self._collect_own("", values)
        return values

    def _collect(self, prefix: str, values: dict[str, Number]) -> None:
        self._collect_own(prefix, values)
        for group in self._groups.values():
            group._collect(f"{prefix}{group.name}.", values)

    def _collect_own(self, prefix: str, values: dict[str, Number]) -> None:
        for gauges in self._gauges.values():
            gauges.collect(prefix, values)
        for name, metric in self._metrics.items():
            full = prefix + name
            match metric:
                case Counter():
                    values[full] = metric.count
                case Gauge():
                    values[full] = metric.value()
                case Meter():
                    values[full] = metric.rate()
                    values[f"{full}.count"] = metric.count
                case Histogram():
                    values[f"{full}.count"] = metric.count
                    if metric.count:
                        values[f"{full}.min"] = metric.min
                        values[f"{full}.max"] = metric.max
                        values[f"{full}.mean"] = metric.mean
                        quantiles = metric.quantiles(*(q for q, _ in QUANTILES))
                        for (_, label), value in zip(QUANTILES, quantiles, strict=True):
                            values[f"{full}.{label}"] = value

    def _get(self, name: str, kind: type[M], make: Callable[[], M]) -> M:
        metric = self._metrics.get(name)
        if metric is None:
            if not isinstance(name, str):
                raise TypeError(
                    f"a metric of group {self.name!r} has the name {name!r}, expected a text"
                )
            if any(name in names for names in self._gauges):
                raise ValueError(
                    f"metric {name!r} of group {self.name!r} is a gauge of the engine; choose "
                    "another name"
                )
            made = make()
            self._metrics[name] = made
            return made
        if not isinstance(metric, kind):
            raise ValueError(
                f"metric {name!r} of group {self.name!r} is a {type(metric).__name__.lower()} "
                "already, "
                f"expected a {kind.__name__.lower()}; choose another name"
            )
        return metric
