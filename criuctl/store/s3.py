"""A store in S3, or in any server that speaks S3: one object per object, below a prefix.

Differences between servers decide how this module uses them:

- Small objects and all conditional ones go by one PutObject; S3 makes that atomic and durable.
  Larger ones go in parts, aborted on any failure and checked afterwards.  No other conditional call
  is used: several servers ignore conditions on CompleteMultipartUpload, CopyObject and
  DeleteObject.
- "If absent" is If-None-Match on PutObject, with a check beforehand for servers that ignore the
  header.  412, 409, 5xx and lost answers mean *unknown* (a repeated request can meet its own
  earlier success): the object is read and compared with what was to be written.
- Transient failures are retried with growing, jittered pauses and a ceiling (tenacity; botocore's
  own retries are off, because they do not cover the reading of bodies).  A server that has never
  answered is given up after about ten seconds, or the first ``s3_timeout`` if it accepts
  connections: a wrong address, or a server that hangs, is likelier than a passing fault.
- Each request ends in time, its attempts, pauses and a slow body included; see `s3_deadline`.
- A HEAD's failure has no body, so 404 might be the bucket or the key: a GET then finds out the
  error.
- The server's ETag, if it is an MD5, is compared with what was sent.  An ETag may be something else
  (encrypted by the server with its own keys, for example): where it differs, the stored content
  decides, and if that is what was sent, the ETags of this server are ignored from then on.  With
  ``verify_writes`` the stored content is always read back.
- Bodies are signed over http, see `s3_client`; small ones (all conditional ones are) go with
  Content-MD5 too, for servers that ignore the signature, and all of them once a server asks, as one
  with object lock does.  Content is received into the caller's memory.

boto3 is imported by this module, and this module only when an S3 store is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from botocore.exceptions import ClientError
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential, wait_random

from ..config import Config
from ..errors import (
    ConfigError,
    CriuctlError,
    Damaged,
    ObjectExists,
    ObjectMissing,
    StoreCannot,
    StoreError,
)
from .base import (
    Capabilities,
    Data,
    Keeping,
    ObjectInfo,
    Store,
    as_views,
    check_limit,
    check_name,
    check_prefix,
    short_object,
    valid_name,
)
from .s3_body import Body, ViewReader, md5_etag, slices
from .s3_client import make_client, server_of
from .s3_deadline import Limit, expect, limited
from .s3_errors import (
    FOREIGN,
    TookTooLong,
    code_of,
    condition_failed,
    condition_unknown,
    digest_wanted,
    field,
    is_transient,
    not_s3,
    status_of,
    store_error,
    unanswered,
)

T = TypeVar("T")

MULTIPART_BYTES = 64 << 20  # larger objects go in parts
_SINGLE_MAX = 5 << 30  # S3's limit for one PutObject
_PIECE = 1 << 20
_SMALL = 1 << 20  # bodies up to this are sent with Content-MD5 always
# seconds before another attempt: first, ceiling, random part
_PAUSE, _PAUSE_MAX, _JITTER = 0.25, 10.0, 0.5
_FIRST_CONTACT_SECONDS, _FIRST_CONTACT_ATTEMPTS = 8.0, 3


class S3Store(Store):
    """Objects in `bucket`, with keys below `prefix` ('' or a path without slashes at its ends)."""

    def __init__(self, bucket: str, prefix: str, config: Config) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._config = config
        self._lock = threading.Lock()
        self._made: Any = None
        self._answered = False  # whether the server ever did
        self._digests = False  # whether the server wants Content-MD5 with every body
        self._conditions = True  # whether the server may be asked for conditional writes
        self._etags = True  # whether the server's ETags may be MD5s

    def place(self) -> str:
        endpoint = self._client.meta.endpoint_url
        with self._mapped_settings():
            return f"{self.url} at {server_of(endpoint)}"

    # -- writing -----------------------------------------------------------------------------------

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        key, views = self._key(name), as_views(data)
        size = sum(view.nbytes for view in views)
        if if_absent:
            self._create(name, views, size)
        elif size <= MULTIPART_BYTES:
            body = Body(views, size)
            etag = self._retry(
                f"writing {name}", lambda: self._put_once(key, body), name, size=size
            )
            self._see_stored(name, body, etag)
        else:
            from .s3_multipart import put_in_parts

            with self._mapped(f"writing {name}", name):
                etag = put_in_parts(
                    self._client, self._call, self._bucket, key, views, size, self._config.uploads
                )
            self._see_stored(name, Body(views, size), etag)

    def _put_once(self, key: str, body: Body, **condition: str) -> str:
        """Send the object once; return the server's ETag."""
        reader = ViewReader(body.views)
        digest = {"ContentMD5": body.md5} if self._digests or body.size <= _SMALL else {}
        try:
            answer = self._client.put_object(
                Bucket=self._bucket, Key=key, Body=reader, **digest, **condition
            )
            return str(answer.get("ETag", ""))
        except ClientError as error:
            if digest or not digest_wanted(error):
                raise
            self._digests = True
            return self._put_once(key, body, **condition)

    def _see_stored(self, name: str, body: Body, etag: str) -> None:
        """Raise `Damaged` if the server has stored something else than was sent.

        The object is removed as far as possible.
        """
        if not self._config.verify_writes:
            if not self._etags or (known := md5_etag(etag)) is None or known == body.etag(known):
                return
        if self._retry(
            f"reading back {name}", lambda: self._same(name, body), name, size=body.size
        ):
            if not self._config.verify_writes:
                self._etags = False
            return
        with suppress(CriuctlError):
            self.delete(name)
        raise Damaged(
            f"{name} in {self.url} at {self._client.meta.endpoint_url} is not what was sent, "
            "though the server acknowledged it",
            hint="The server, or its disk or memory, is faulty: what it holds cannot be relied on.",
            object=name,
        )

    def _create(self, name: str, views: list[memoryview], size: int) -> None:
        if size > _SINGLE_MAX:
            raise StoreCannot(
                f"{name} is too large ({size} bytes) to be written only if absent", object=name
            )
        taken = ObjectExists(f"{name} is in {self.url} already", object=name)
        body = Body(views, size)
        if (
            self._retry(f"looking at {name}", lambda: self._same(name, body), name, size=size)
            is not None
        ):
            raise taken

        made: list[str] = []  # the server's answer, unless the stored object was compared

        def attempt() -> bool:
            """Return whether the object is ours now; raises when that is unknown."""
            try:
                made.append(
                    self._put_once(
                        self._key(name), body, **({"IfNoneMatch": "*"} if self._conditions else {})
                    )
                )
                return True
            except FOREIGN as error:
                if condition_unknown(error) and self._conditions:
                    # nothing was written; only the check beforehand is left
                    self._conditions = False
                    return attempt()
                if not (condition_failed(error) or is_transient(error)):
                    raise
                ours = self._same(name, body)
                if ours is None:
                    raise
                return ours

        if not self._retry(f"creating {name}", attempt, name, also=condition_failed, size=size):
            raise taken
        if made:
            self._see_stored(name, body, made[-1])

    def _same(self, name: str, body: Body) -> bool | None:
        """Return whether the object is exactly `body`; None if it is absent."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
        except ClientError as error:
            if code_of(error) == "NoSuchKey":
                return None
            raise
        with closing(answer["Body"]) as stream:
            if self._field(answer, "ContentLength") != body.size:
                return False
            return all(
                stream.read(piece.nbytes) == piece
                for view in body.views
                for piece in slices(view, _PIECE)
            )

    def delete(self, name: str) -> None:
        key = self._key(name)
        try:
            self._retry(
                f"deleting {name}",
                lambda: self._client.delete_object(Bucket=self._bucket, Key=key),
                name,
            )
        except ObjectMissing:
            return  # some servers answer so

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str, limit: int | None = None) -> bytes:
        key = self._key(name)

        def attempt() -> bytes:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            with closing(answer["Body"]) as stream:
                # urllib3 ensures that all of it comes, and no more.
                size = self._field(answer, "ContentLength")
                check_limit(name, self.url, size, limit)
                expect(size)
                content: bytes = stream.read()
            return content

        return self._retry(f"reading {name}", attempt, name)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        if not length:
            self.stat(name)
            return b""

        def attempt() -> bytes:
            with self._span(name, offset, length) as stream:
                content: bytes = stream.read()
            return content

        return self._retry(f"reading {name}", attempt, name, size=length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        target = buffer.cast("B")
        if not target.nbytes:
            self.stat(name)
            return

        def attempt() -> None:
            done = 0
            with self._span(name, offset, target.nbytes) as stream:
                while done < target.nbytes:
                    count = stream.readinto(target[done : done + _PIECE])
                    if not count:
                        raise short_object(name, self.url, offset, target.nbytes, done)
                    done += count

        self._retry(f"reading {name}", attempt, name, size=target.nbytes)

    @contextmanager
    def _span(self, name: str, offset: int, length: int) -> Iterator[Any]:
        """Yield a stream of exactly these bytes.

        It raises IncompleteRead if the server ends it early.
        """
        span = f"bytes={offset}-{offset + length - 1}"
        answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name), Range=span)
        with closing(answer["Body"]) as stream:
            self._check_span(answer, name, offset, length)
            yield stream

    def _check_span(self, answer: dict[str, Any], name: str, offset: int, length: int) -> None:
        """Check that the server is about to send the requested bytes: some answer 200 to any
        range.
        """
        sent, span = self._field(answer, "ContentLength"), answer.get("ContentRange", "")
        if span.startswith(f"bytes {offset}-") or (not span and offset == 0):
            if sent < length:
                raise short_object(name, self.url, offset, length, sent)
            if sent == length:
                return
        raise StoreError(
            f"{self.url} does not honour ranges: asked for {length} bytes at {offset} of {name}, "
            f"got {span or sent}"
        )

    def stat(self, name: str) -> ObjectInfo:
        key = self._key(name)

        def attempt() -> ObjectInfo:
            try:
                found = self._client.head_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if not 300 <= status_of(error) < 500:
                    raise
                # The same request by GET, whose answer has a body with the reason.
                with closing(self._client.get_object(Bucket=self._bucket, Key=key)["Body"]):
                    raise error from None
            return ObjectInfo(
                name,
                self._field(found, "ContentLength"),
                self._field(found, "LastModified").timestamp(),
            )

        return self._retry(f"looking at {name}", attempt, name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start, last = self._base + check_prefix(prefix), ""
        more: dict[str, str] = {}
        while True:
            page = self._list_page(start, **more)
            for item in page.get("Contents", []):
                key = self._field(item, "Key")
                if key <= last or not key.startswith(start):
                    raise StoreError(
                        f"{self.url} does not list its objects in order ({key!r} after {last!r})",
                        hint=(
                            "criuctl needs an S3 server that lists by key; AWS directory buckets "
                            "do not."
                        ),
                    )
                last = key
                if valid_name(name := key[len(self._base) :]):
                    yield ObjectInfo(
                        name,
                        self._field(item, "Size"),
                        self._field(item, "LastModified").timestamp(),
                    )
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": self._field(page, "NextContinuationToken")}
            if following == more:
                raise not_s3(
                    f"{self.url} at {self._client.meta.endpoint_url}", "its listing never ends"
                )
            more = following

    def _list_page(self, start: str, **more: Any) -> Any:
        page = self._retry(
            "listing",
            lambda: self._client.list_objects_v2(Bucket=self._bucket, Prefix=start, **more),
        )
        self._field(page, "Name")  # a login page, for example, is not an empty store
        return page

    def _field(self, answer: dict[str, Any], name: str) -> Any:
        return field(answer, name, f"{self.url} at {self._client.meta.endpoint_url}")

    # -- the place ---------------------------------------------------------------------------------

    def create(self) -> None:
        """Check that the bucket exists and can be listed; its owner makes buckets."""
        self._list_page(self._base, MaxKeys=1)

    def probe(self) -> Capabilities:
        """Let conditional writers race each other on objects of our own; see `s3_probe`."""
        from .s3_probe import probe

        self.create()
        with self._mapped("probing"), limited(self._config):
            return probe(self._client, self._bucket, self._base)

    def sweep(self, older_than: float) -> int:
        """Abort multipart uploads below the prefix that were begun `older_than` seconds ago or
        more.
        """
        from .s3_multipart import abort_stale

        with self._mapped("looking for unfinished uploads"):
            return abort_stale(self._client, self._call, self._bucket, self._base, older_than)

    def keeping(self) -> Keeping | None:
        from .s3_versions import keeping

        with self._mapped("looking for older versions"):
            return keeping(self._client, self._call, self._bucket, self._base)

    def prepare(self) -> None:
        with suppress(CriuctlError):
            _ = self._client

    def close(self) -> None:
        with self._lock:
            if self._made is not None:
                self._made.close()
                self._made = None

    # -- requests ----------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self._base + check_name(name)

    @property
    def _client(self) -> Any:
        """boto3's client, made at first use; its clients may be used from all threads."""
        with self._lock:
            if self._made is None:
                with self._mapped_settings():
                    self._made = make_client(self._config)
            return self._made

    @contextmanager
    def _mapped_settings(self) -> Iterator[None]:
        try:
            yield
        except FOREIGN as error:
            raise store_error(
                error, "preparing the connection", self.url, self._config.s3_endpoint or "S3"
            ) from error
        except ValueError:
            # Its text repeats parts of the endpoint, also of a password: the text before a slash
            # passes for a port.
            raise ConfigError(
                "the S3 settings do not make sense: the endpoint is not an address",
                hint=(
                    "Look at s3_endpoint, AWS_ENDPOINT_URL and ~/.aws: it is written "
                    "https://HOST:PORT."
                ),
            ) from None

    @contextmanager
    def _mapped(self, doing: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except FOREIGN as error:
            raise store_error(
                error, doing, self.url, self._client.meta.endpoint_url, name
            ) from error
        except ValueError as error:  # a number or a time that boto3 cannot read
            raise not_s3(
                f"{doing} in {self.url} at {self._client.meta.endpoint_url}", str(error)
            ) from error
        except RecursionError as error:
            # botocore looks for a bucket's region by asking again, even where every answer is a
            # redirection.
            raise StoreError(
                f"{doing} in {self.url}: {self._client.meta.endpoint_url} redirects every request",
                hint="Is the endpoint the address of an S3 server?",
            ) from error

    def _retry(
        self,
        doing: str,
        request: Callable[[], T],
        name: str = "",
        also: Callable[[BaseException], bool] | None = None,
        size: int = 0,
    ) -> T:
        """Return `request()`, with contents of `size` bytes, retried after transient failures.

        botocore's errors become criuctl's.
        """
        with self._mapped(doing, name):
            return self._call(request, also, size)

    def _call(
        self,
        request: Callable[[], T],
        also: Callable[[BaseException], bool] | None = None,
        size: int = 0,
    ) -> T:
        """Return `request()`, retried after failures that are transient or that `also` accepts.

        botocore's errors pass through.
        """
        with limited(self._config, size) as limit:

            def attempt() -> T:
                limit.attempt()
                return request()

            attempts = Retrying(
                retry=retry_if_exception(
                    lambda error: is_transient(error) or (also is not None and also(error))
                ),
                wait=wait_exponential(multiplier=_PAUSE, max=_PAUSE_MAX) + wait_random(0, _JITTER),
                stop=partial(self._give_up, limit),
                reraise=True,
            )
            try:
                result = attempts(attempt)
            except FOREIGN as error:
                if limit.over() and is_transient(error):
                    raise TookTooLong(seconds=limit.seconds, error=error) from error
                raise
        self._answered = True
        return result

    def _give_up(self, limit: Limit, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome is not None else None
        attempts = max(1, self._config.s3_retries)
        if error is not None and status_of(error):
            self._answered = True
        if limit.over(state.upcoming_sleep):
            return True
        if not self._answered and error is not None and unanswered(error):
            if (state.seconds_since_start or 0.0) > _FIRST_CONTACT_SECONDS:
                return True
            attempts = min(attempts, _FIRST_CONTACT_ATTEMPTS)
        return state.attempt_number >= attempts
