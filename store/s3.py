"""A store in an S3 bucket, through ``obstore``. ``docs/store.md`` says what a server has to be able to do.

What a folder does with links, exclusive creation and file times is done with conditional writes here: an object appears
whole, and only if there is none (``If-None-Match: *``); a lease is renewed by writing it again, and only if it is still
there unchanged (``If-Match``).

Every request is tried again, with growing and random pauses, until a deadline: what fails then is `Unavailable`. What
no repetition would cure (no such bucket, no rights, expired credentials, a full quota) is told at once. A write whose
answer was lost is looked at before it is believed to be somebody else's.
"""

from __future__ import annotations

import io
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import structlog

from moorage.errors import Conflict, EnvironmentLacking, MoorageError, NoCapacity, NotFound, Unavailable
from moorage.store.backend import Data, Entry
from moorage.store.s3_access import credential_provider, parse, region_of
from moorage.store_settings import StoreSettings

T = TypeVar("T")
_log = structlog.get_logger(__name__)

_AHEAD = 4 << 20
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_CLOCK_SECONDS = 300.0
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_ROLES = "//169.254.169.254/"  # where a machine's role is asked for when nothing else has credentials
_NOWHERE = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a credentials_file in [store_settings]"
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired"}
_REFUSED = {
    "AccessDenied": "give these credentials the rights to list, read, write and delete there",
    "AccountProblem": "ask the owner of the account",
    "AllAccessDisabled": "ask the owner of the account",
    "AuthorizationHeaderMalformed": "check the region in [store_settings]",
    "InvalidAccessKeyId": "check the credentials",
    "InvalidToken": "check the credentials",
    "PermanentRedirect": "check endpoint and region in [store_settings]",
    "RequestTimeTooSkewed": "set this machine's clock",
    "SignatureDoesNotMatch": "check the credentials",
}
_FULL = {"QuotaExceeded", "QuotaExceededException", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"}


class S3Backend:
    """See `backend.Backend`. Thread-safe."""

    def __init__(self, location: str, settings: StoreSettings) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError as error:
            raise EnvironmentLacking(
                f"store {location}: the package obstore is not installed", "pip install 'moorage[s3]'"
            ) from error
        bucket, prefix = parse(location)
        self._location = location.rstrip("/")
        self._bucket = bucket
        self._api: Any = obstore
        self._errors: Any = exceptions
        self._patience = settings.retry_seconds
        options: Any = {
            "timeout": timedelta(seconds=settings.request_seconds),
            "connect_timeout": timedelta(seconds=min(10.0, settings.request_seconds)),
            "allow_http": True,  # an endpoint with http:// was named: nothing falls back to it
        }
        configuration: Any = {"region": region_of(settings)}
        if settings.endpoint:
            configuration["endpoint"] = settings.endpoint
        self._store: Any = S3Store(
            bucket,
            prefix=prefix or None,
            config=configuration,
            client_options=options,
            # Repeating is done here, alike for every kind of failure.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
            credential_provider=credential_provider(settings),
        )
        self._lock = threading.Lock()
        self._clock: tuple[float, float] | None = None  # when it was asked, and how far ahead of ours it is

    @property
    def location(self) -> str:
        return self._location

    @property
    def settle_seconds(self) -> float:
        return 0.0  # S3 shows in a listing what was written before it began

    @property
    def pack_size(self) -> int:
        return 16 << 20  # one request writes it, and it is in memory until then

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make sure that the bucket is there, and that its server minds conditions. Raises `EnvironmentLacking`."""
        name = f"tmp/{secrets.token_hex(16)}"
        self.put(name, b"1")
        try:
            if self.put(name, b"2"):
                raise EnvironmentLacking(
                    f"store {self._location}: this S3 server overwrites objects that it was asked to leave alone",
                    "use one that honours If-None-Match on writes (docs/store.md)",
                )
        finally:
            self.delete(name)

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:
        body = bytes(data)
        tries = 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            try:
                self._api.put(self._store, name, body, mode="create", use_multipart=False)
            except self._errors.AlreadyExistsError:
                # If an earlier try's answer was lost, this object is ours.
                return tries > 1 and self._read(name) == body
            return True

        return self._repeat(attempt, name)

    def create(self, name: str) -> S3Sink:
        return S3Sink(self, name)

    def open(self, name: str) -> S3Source:
        found = self.stat(name)
        if found is None:
            raise NotFound(f"{self._location}/{name} does not exist", "")
        return S3Source(self, name, found.size)

    def get(self, name: str) -> bytes:
        return self._repeat(lambda: self._read(name), name)

    def _read(self, name: str) -> bytes:
        found = self._api.get(self._store, name)
        data = bytes(found.bytes())
        if len(data) != found.meta["size"]:
            raise _Partial(f"{len(data)} of {found.meta['size']} bytes came")
        return data

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``."""

        def attempt() -> bytes:
            data = bytes(self._api.get_range(self._store, name, start=offset, length=length))
            if len(data) != length:
                raise _Partial(f"{len(data)} of {length} bytes came")
            return data

        return self._repeat(attempt, name)

    def stat(self, name: str) -> Entry | None:
        def attempt() -> Entry | None:
            try:
                try:
                    return _entry(self._api.head(self._store, name))
                except self._errors.BaseError as error:
                    if isinstance(error, FileNotFoundError) or "status code: 4" not in str(error):
                        raise
                    # The answer to HEAD has no body that would say why: the one to GET has.
                    return _entry(self._api.get(self._store, name).meta)
            except FileNotFoundError:
                return None

        return self._repeat(attempt, name)

    def list(self, folder: str) -> Iterator[Entry]:
        def attempt() -> list[Entry]:
            return [_entry(found) for batch in self._api.list(self._store, f"{folder}/") for found in batch]

        yield from self._repeat(attempt, folder)

    def delete(self, name: str) -> bool:
        there = self.stat(name) is not None
        if there:
            self._repeat(lambda: self._api.delete(self._store, name), name)
        return there

    def touch(self, name: str) -> bool:
        def attempt() -> bool:
            try:
                found = self._api.get(self._store, name)
                tag = {"e_tag": found.meta["e_tag"]}
                self._api.put(self._store, name, bytes(found.bytes()), mode=tag, use_multipart=False)
            except FileNotFoundError:
                return False
            except self._errors.PreconditionError:
                # Removed meanwhile, or renewed by a try whose answer was lost: the next look tells.
                return self._api_stat(name)
            return True

        return self._repeat(attempt, name)

    def _api_stat(self, name: str) -> bool:
        try:
            self._api.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def now(self) -> float:
        ours = time.clock_gettime(time.CLOCK_BOOTTIME)
        with self._lock:
            known = self._clock
        if known is None or ours - known[0] > _CLOCK_SECONDS:
            name = f"tmp/{secrets.token_hex(16)}"
            self.put(name, b"")
            try:
                found = self.stat(name)
            finally:
                self.delete(name)
            if found is None:
                raise Unavailable(f"{self._location}: an object that was just written is gone", "try again")
            ours = time.clock_gettime(time.CLOCK_BOOTTIME)
            known = (ours, found.modified - ours)
            with self._lock:
                self._clock = known
        return ours + known[1]

    def free_bytes(self) -> int:
        return 1 << 60  # a bucket does not say

    def _repeat(self, attempt: Callable[[], T], name: str) -> T:
        """What ``attempt`` returns, tried again while that may help."""
        deadline = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                return attempt()
            except MoorageError:
                raise
            except (self._errors.BaseError, OSError, _Partial) as error:
                trouble = self._told(error, name)
            # Waiting for a random part of the pause keeps hosts apart that failed together.
            wait = pause * random.uniform(0.5, 1.0)
            if time.monotonic() + wait > deadline:
                raise trouble
            _log.info("an S3 request is tried again", object=name, reason=trouble.message)
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _told(self, error: Exception, name: str) -> Unavailable:
        """Raise what repeating will not cure; return what to say of the rest if it does not end."""
        # What obstore says goes on for pages, and may hold what a server sent: only parts that are known are told on.
        text = str(error).split("\n\nDebug source", 1)[0]
        found = _CODE.search(text)
        code = found.group(1) if found else ""
        where = f"{self._location}/{name}"
        if code == "NoSuchBucket":
            raise NotFound(
                f"bucket {self._bucket} of store {self._location} does not exist", "create it, or name another"
            )
        if code in _EXPIRED:
            raise EnvironmentLacking(
                f"{where}: the credentials for the bucket have expired ({code})",
                "renew them where they come from ([store_settings] credentials_file, AWS_*); they are read anew",
            )
        if code in _FULL:
            raise NoCapacity(f"{where}: the bucket takes no more ({code})", "raise the quota, or run `moorage prune`")
        if _ROLES in text:
            raise EnvironmentLacking(f"store {self._location}: there are no credentials for the bucket", _NOWHERE)
        denied = isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError)
        if code in _REFUSED or denied or "status code: 403" in text or "status code: 401" in text:
            hint = _REFUSED.get(code, _REFUSED["AccessDenied"])
            raise EnvironmentLacking(f"{where}: refused ({code or 'no rights'})", hint)
        if isinstance(error, FileNotFoundError):
            raise NotFound(f"{where} does not exist", "")
        return Unavailable(f"{where}: {code or _shortened(text)}", "check that the S3 server answers, then try again")


class _Partial(Exception):
    """Fewer bytes came than were announced."""


def _shortened(text: str) -> str:
    status = re.search(r"status code: (\d{3} [\w ]+)", text)
    if status:
        return f"the server answered {status.group(1).strip()}"
    for known in ("timed out", "timeout", "onnection refused", "onnection reset", "dns error", "end of file", "body"):
        if known in text:
            return {"onnection refused": "connection refused", "onnection reset": "connection reset"}.get(known, known)
    return text.rpartition("Error performing")[2][:80].strip() or text[:80]


def _entry(meta: Any) -> Entry:
    return Entry(str(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())


class S3Sink:
    """A pack in memory until it is written in one request. See `backend.Sink`."""

    def __init__(self, backend: S3Backend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._buffer = io.BytesIO()
        self._written = False

    def write(self, buffers: Sequence[Data]) -> None:
        for buffer in buffers:
            self._buffer.write(buffer)

    def finish(self) -> None:
        data = self._buffer.getvalue()
        self._buffer = io.BytesIO()
        self._written = True
        if not self._backend.put(self._name, data):
            raise Conflict(f"{self._backend.location}/{self._name} exists already", "packs are never written twice")

    def abort(self) -> None:
        if self._written:
            try:
                self._backend.delete(self._name)
            except MoorageError as error:
                _log.info("a pack is left for prune", pack=self._name, reason=error.message)


class S3Source:
    """An object whose size is known. See `backend.Source`.

    Reads ahead: chunks that belong together lie together, and a request costs more than the bytes behind the ones asked
    for. For one thread at a time, as its readers use it.
    """

    def __init__(self, backend: S3Backend, name: str, size: int) -> None:
        self._backend = backend
        self._name = name
        self._size = size
        self._at = 0  # where what was read ahead begins
        self._ahead = b""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        length = min(len(buffer), self._size - offset)
        if length <= 0:
            return 0
        if not self._at <= offset <= offset + length <= self._at + len(self._ahead):
            self._at = offset
            self._ahead = self._backend.read_range(self._name, offset, min(max(length, _AHEAD), self._size - offset))
        start = offset - self._at
        buffer[:length] = memoryview(self._ahead)[start : start + length]
        return length

    def close(self) -> None:
        pass
