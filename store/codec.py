"""Whether compressing pays: decided for each chunk from a sample and from how fast the store takes bytes."""

from __future__ import annotations

import time

import zstandard

from moorage.store.chunker import PAGE

LEVEL = 1
_SAMPLE_PAGES = 3
_DOUBT_AFTER = 4  # samples in a row that said no
_MEASURED = 64 << 10  # bytes: less than this says little about speed


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

    def compress(self, data: memoryview) -> bytes | None:
        """``data`` compressed, or None where that does not pay."""
        # Where sampling has often said no, one page has to look well before more are tried.
        if self._refusals >= _DOUBT_AFTER and not self._sample(data, 1):
            return None
        if not self._sample(data, _SAMPLE_PAGES):
            self._refusals += 1
            return None
        self._refusals = 0
        before = time.monotonic()
        packed = self._zstd.compress(data)
        if len(data) >= _MEASURED:
            self._codec.measured(len(data), time.monotonic() - before)
        return packed if len(packed) < len(data) * 0.95 else None

    def _sample(self, data: memoryview, pages: int) -> bool:
        size = len(data)
        if size > 2 * pages * PAGE:
            step = size // pages
            data = memoryview(b"".join(data[at : at + PAGE] for at in range(step // 2, size, step)))
        ratio = len(self._zstd.compress(data)) / max(len(data), 1)
        return pays(ratio, self._store.value, self._codec.value * self._lanes)
