"""A store in S3, or in any server that speaks S3: one object per object, below a prefix.

Differences between servers decide how this module uses them:

- Small objects and all conditional ones go by one PutObject; S3 makes that atomic and durable.
  Larger ones go in parts, aborted on any failure and checked afterwards.  No other conditional call
  is used: several servers ignore conditions on CompleteMultipartUpload, CopyObject and
  DeleteObject.
- "If absent" is If-None-Match on PutObject, with a check beforehand for servers that ignore the
  header.  412, 409, 5xx and lost answers mean *unknown* (a repeated request can meet its own
  earlier success): the object is read and compared with what was to be written.
- Transient failures are retried, and each request ends in time: see `s3_requests`.
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

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from botocore.exceptions import ClientError

from ..config import Config
from ..errors import CriuctlError, Damaged, ObjectExists, ObjectMissing, StoreCannot, StoreError
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
from .s3_client import server_of
from .s3_deadline import expect, limited
from .s3_errors import (
    FOREIGN,
    code_of,
    condition_failed,
    condition_unknown,
    digest_wanted,
    is_transient,
    not_s3,
    status_of,
)
from .s3_multipart import abort_stale
from .s3_probe import probe
from .s3_requests import Requests
from .s3_versions import keeping

MULTIPART_BYTES = 64 << 20  # larger objects go in parts
_SINGLE_MAX = 5 << 30  # S3's limit for one PutObject
_PIECE = 1 << 20
_SMALL = 1 << 20  # bodies up to this are sent with Content-MD5 always


class S3Store(Store):
    """Objects in `bucket`, with keys below `prefix` ('' or a path without slashes at its ends)."""

    def __init__(self, bucket: str, prefix: str, config: Config) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._config = config
        self._s3 = Requests(self.url, config)
        self._digests = False  # whether the server wants Content-MD5 with every body
        self._conditions = True  # whether the server may be asked for conditional writes
        self._etags = True  # whether the server's ETags may be MD5s

    def place(self) -> str:
        endpoint = self._s3.client.meta.endpoint_url
        with self._s3.mapped_settings():
            return f"{self.url} at {server_of(endpoint)}"

    # -- writing -----------------------------------------------------------------------------------

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        key, views = self._key(name), as_views(data)
        size = sum(view.nbytes for view in views)
        if if_absent:
            self._create(name, views, size)
        elif size <= MULTIPART_BYTES:
            body = Body(views, size)
            etag = self._s3.retry(
                f"writing {name}", lambda: self._put_once(key, body), name, size=size
            )
            self._see_stored(name, body, etag)
        else:
            from .s3_multipart import put_in_parts

            with self._s3.mapped(f"writing {name}", name):
                etag = put_in_parts(
                    self._s3.client,
                    self._s3.call,
                    self._bucket,
                    key,
                    views,
                    size,
                    self._config.uploads,
                )
            self._see_stored(name, Body(views, size), etag)

    def _put_once(self, key: str, body: Body, **condition: str) -> str:
        """Send the object once; return the server's ETag."""
        reader = ViewReader(body.views)
        digest = {"ContentMD5": body.md5} if self._digests or body.size <= _SMALL else {}
        try:
            answer = self._s3.client.put_object(
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
        if self._s3.retry(
            f"reading back {name}", lambda: self._same(name, body), name, size=body.size
        ):
            if not self._config.verify_writes:
                self._etags = False
            return
        with suppress(CriuctlError):
            self.delete(name)
        raise Damaged(
            f"{name} in {self._s3.where} is not what was sent, though the server acknowledged it",
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
            self._s3.retry(f"looking at {name}", lambda: self._same(name, body), name, size=size)
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

        if not self._s3.retry(f"creating {name}", attempt, name, also=condition_failed, size=size):
            raise taken
        if made:
            self._see_stored(name, body, made[-1])

    def _same(self, name: str, body: Body) -> bool | None:
        """Return whether the object is exactly `body`; None if it is absent."""
        try:
            answer = self._s3.client.get_object(Bucket=self._bucket, Key=self._key(name))
        except ClientError as error:
            if code_of(error) == "NoSuchKey":
                return None
            raise
        with closing(answer["Body"]) as stream:
            if self._s3.field(answer, "ContentLength") != body.size:
                return False
            return all(
                stream.read(piece.nbytes) == piece
                for view in body.views
                for piece in slices(view, _PIECE)
            )

    def delete(self, name: str) -> None:
        key = self._key(name)
        try:
            self._s3.retry(
                f"deleting {name}",
                lambda: self._s3.client.delete_object(Bucket=self._bucket, Key=key),
                name,
            )
        except ObjectMissing:
            return  # some servers answer so

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str, limit: int | None = None) -> bytes:
        key = self._key(name)

        def attempt() -> bytes:
            answer = self._s3.client.get_object(Bucket=self._bucket, Key=key)
            with closing(answer["Body"]) as stream:
                # urllib3 ensures that all of it comes, and no more.
                size = self._s3.field(answer, "ContentLength")
                check_limit(name, self.url, size, limit)
                expect(size)
                content: bytes = stream.read()
            return content

        return self._s3.retry(f"reading {name}", attempt, name)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        if not length:
            self.stat(name)
            return b""

        def attempt() -> bytes:
            with self._span(name, offset, length) as stream:
                content: bytes = stream.read()
            return content

        return self._s3.retry(f"reading {name}", attempt, name, size=length)

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

        self._s3.retry(f"reading {name}", attempt, name, size=target.nbytes)

    @contextmanager
    def _span(self, name: str, offset: int, length: int) -> Iterator[Any]:
        """Yield a stream of exactly these bytes.

        It raises IncompleteRead if the server ends it early.
        """
        span = f"bytes={offset}-{offset + length - 1}"
        answer = self._s3.client.get_object(Bucket=self._bucket, Key=self._key(name), Range=span)
        with closing(answer["Body"]) as stream:
            self._check_span(answer, name, offset, length)
            yield stream

    def _check_span(self, answer: dict[str, Any], name: str, offset: int, length: int) -> None:
        """Check that the server is about to send the requested bytes: some answer 200 to any
        range.
        """
        sent, span = self._s3.field(answer, "ContentLength"), answer.get("ContentRange", "")
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
                found = self._s3.client.head_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if not 300 <= status_of(error) < 500:
                    raise
                # The same request by GET, whose answer has a body with the reason.
                with closing(self._s3.client.get_object(Bucket=self._bucket, Key=key)["Body"]):
                    raise error from None
            return ObjectInfo(
                name,
                self._s3.field(found, "ContentLength"),
                self._s3.field(found, "LastModified").timestamp(),
            )

        return self._s3.retry(f"looking at {name}", attempt, name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start, last = self._base + check_prefix(prefix), ""
        more: dict[str, str] = {}
        while True:
            page = self._list_page(start, **more)
            for item in page.get("Contents", []):
                key = self._s3.field(item, "Key")
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
                        self._s3.field(item, "Size"),
                        self._s3.field(item, "LastModified").timestamp(),
                    )
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": self._s3.field(page, "NextContinuationToken")}
            if following == more:
                raise not_s3(self._s3.where, "its listing never ends")
            more = following

    def _list_page(self, start: str, **more: Any) -> Any:
        page = self._s3.retry(
            "listing",
            lambda: self._s3.client.list_objects_v2(Bucket=self._bucket, Prefix=start, **more),
        )
        self._s3.field(page, "Name")  # a login page, for example, is not an empty store
        return page

    # -- the place ---------------------------------------------------------------------------------

    def create(self) -> None:
        """Check that the bucket exists and can be listed; its owner makes buckets."""
        self._list_page(self._base, MaxKeys=1)

    def probe(self) -> Capabilities:
        """Let conditional writers race each other on objects of our own; see `s3_probe`."""
        self.create()
        with self._s3.mapped("probing"), limited(self._config):
            return probe(self._s3.client, self._bucket, self._base)

    def sweep(self, older_than: float) -> int:
        """Abort multipart uploads below the prefix that were begun `older_than` seconds ago or
        more.
        """
        with self._s3.mapped("looking for unfinished uploads"):
            return abort_stale(self._s3.client, self._s3.call, self._bucket, self._base, older_than)

    def keeping(self) -> Keeping | None:
        with self._s3.mapped("looking for older versions"):
            return keeping(self._s3.client, self._s3.call, self._bucket, self._base)

    def prepare(self) -> None:
        with suppress(CriuctlError):
            _ = self._s3.client

    def close(self) -> None:
        self._s3.close()

    def _key(self, name: str) -> str:
        return self._base + check_name(name)
