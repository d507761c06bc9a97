"""One pass over a stream: taking samples under their own seeds, and passing over the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final

from samestep.data.stream import CountsPasses, Recalls, Remembers, Seeks, Skips, Streamed
from samestep.errors import DataError
from samestep.numerics.seeds import seed_sample

_NONE: Final = object()


@final
class Pass:
    """A pass that is opened at a place; `place` counts the samples of it that are behind.

    Law: sample p of pass e is made under the seed of (seed, e, p), whether or not those before it were.
    """

    def __init__(
        self, stream: Streamed, *, seed: int, epoch: int, place: int = 0, source: Any = None
    ) -> None:
        """Raise DataError where the stream ends before the place."""
        self._seed = seed
        self.epoch = epoch
        self.place = 0
        self._held: object = _NONE  # the next sample, where it was read already
        self._is_over = False
        self._samples = self._open(stream, place, source)
        if self.skip(place - self.place) and self._is_over:
            raise DataError(
                f"the stream ended after {self.place} samples of pass {epoch}, and the run is to go on at "
                f"sample {place}. Go on with the data of before."
            )

    def has_more(self) -> bool:
        """Say whether the pass goes on; that may read the next sample."""
        if self._held is _NONE and not self._is_over:
            self._held = self._read()
        return not self._is_over

    def take(self) -> Any:
        """Return the next sample; only where there is one."""
        if not self.has_more():
            raise StopIteration
        sample, self._held = self._held, _NONE
        self.place += 1
        return sample

    def skip(self, count: int) -> int:
        """Pass over up to `count` samples; return how many there were."""
        done = 0
        if count > 0 and self._held is not _NONE:
            self._held, done = _NONE, 1
            self.place += 1
        if done < count and not self._is_over and isinstance(self._samples, Skips):
            there = self._guarded_skip(self._samples, count - done)
            self._is_over = there < count - done
            self.place += there
            return done + there
        while done < count and not self._is_over:
            self._read()
            if not self._is_over:
                self.place += 1
                done += 1
        return done

    def state(self) -> Any:
        """Return the stream's own state, where it has one; only while no sample is read ahead."""
        return self._samples.state() if isinstance(self._samples, Remembers) else None

    def _open(self, stream: Streamed, place: int, source: Any) -> Iterator[Any]:
        seed_sample(self._seed, self.epoch, -1)
        try:
            if isinstance(stream, CountsPasses):
                stream.set_epoch(self.epoch)
            if source is not None and isinstance(stream, Recalls):
                stream.load_state(source)
                self.place = place
            elif place and isinstance(stream, Seeks):
                stream.seek(place)
                self.place = place
            return iter(stream)
        except Exception as exc:
            raise DataError(
                f"the stream could not begin pass {self.epoch} at sample {place}: {exc!r}"
            ) from exc

    def _read(self) -> object:
        seed_sample(self._seed, self.epoch, self.place)
        try:
            return next(self._samples)
        except StopIteration:
            self._is_over = True
            return _NONE
        except (Exception, SystemExit) as exc:
            raise DataError(
                f"sample {self.place} of pass {self.epoch} of the stream failed: {exc!r}\nIts iterator "
                "raised this; a stream cannot be read beyond it."
            ) from exc

    def _guarded_skip(self, samples: Skips, count: int) -> int:
        try:
            return samples.skip(count)
        except (Exception, SystemExit) as exc:
            raise DataError(
                f"passing over {count} samples from sample {self.place} of pass {self.epoch} of the stream "
                f"failed: {exc!r}"
            ) from exc
