"""Whether compressing pays: decided for each chunk from a sample and from how fast the store takes bytes."""

from __future__ import annotations

import time

import zstandard

from moorage.store.chunker import PAGE

LEVEL = 1
_SAMPLE_PIECES = 3
_SKIP_AFTER = 4  # samples in a row that said no
_SKIP = 7  # chunks to pass over then, before the next sample


def pays(ratio: float, store_rate: float, codec_rate: float) -> bool:
    """Whether a chunk is stored sooner when compressed.

    ``ratio`` is compressed size over plain size, the rates are bytes per second of the store and of the codec. Plain
    takes ``1 / store_rate`` for each byte, compressed ``1 / codec_rate + ratio / store_rate``.
    """
    return ratio < 1.0 and 1.0 / codec_rate + ratio / store_rate < 1.0 / store_rate


class Rate:
    """A moving average of bytes per second. Written by several threads; a lost update does no harm."""

    def __init__(self, initial: float) -> None:
        self.value = initial

    def measured(self, size: int, seconds: float) -> None:
        if size and seconds > 0:
            self.value += 0.3 * (size / seconds - self.value)


class Compressor:
    """One writing thread's compressor. ``lanes`` such threads share the store's bandwidth."""

    def __init__(self, store_rate: Rate, codec_rate: Rate, lanes: int) -> None:
        self._store = store_rate
        self._codec = codec_rate
        self._lanes = lanes
        self._zstd = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        self._refusals = 0
        self._skip = 0

    def compress(self, data: memoryview) -> bytes | None:
        """``data`` compressed, or None where that does not pay."""
        if self._skip:
            self._skip -= 1
            return None
        if not self._worth(data):
            self._refusals += 1
            if self._refusals >= _SKIP_AFTER:
                self._skip = _SKIP
            return None
        self._refusals = 0
        packed = self._timed(data)
        return packed if len(packed) < len(data) * 0.95 else None

    def _worth(self, data: memoryview) -> bool:
        size = len(data)
        if size > 2 * _SAMPLE_PIECES * PAGE:
            step = (size - PAGE) // (_SAMPLE_PIECES - 1)
            data = memoryview(b"".join(data[i * step : i * step + PAGE] for i in range(_SAMPLE_PIECES)))
        return pays(len(self._timed(data)) / max(len(data), 1), self._store.value, self._codec.value * self._lanes)

    def _timed(self, data: memoryview) -> bytes:
        before = time.thread_time()
        packed = self._zstd.compress(data)
        if len(data) >= PAGE:
            self._codec.measured(len(data), time.thread_time() - before)
        return packed
