"""Objects too large for one request: S3's multipart upload, whole or not at all.

Parts are sent by a few threads, each with retries. On any failure, also a user's interrupt, the
upload is aborted, so that no parts stay behind and cost money unseen. What the server then holds
under the name is checked: some answer the completion with an empty ETag, or lose their answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from ..errors import StoreError
from .s3_body import ViewReader, in_parts, md5_of
from .s3_errors import code_of, digest_wanted, field, not_s3

T = TypeVar("T")
# runs a request, with contents of `size` bytes, with retries after transient failures
Caller = Callable[..., Any]

# no other object that criuctl stores is large enough for parts
_LARGE = ("packs/", "index/", "checkpoints/")


class _Stopped(Exception):
    """Another part failed, so this one is not sent."""


def put_in_parts(
    client: Any,
    call: Caller,
    bucket: str,
    key: str,
    views: list[memoryview],
    size: int,
    threads: int,
) -> str:
    """Store `views` (`size` bytes together) as one object; return its ETag.

    botocore's errors pass through.
    """
    target = {"Bucket": bucket, "Key": key}
    where = client.meta.endpoint_url
    upload = field(call(lambda: client.create_multipart_upload(**target)), "UploadId", where)
    try:
        parts = _send_parts(client, call, {**target, "UploadId": upload}, views, size, threads)
        _complete(client, call, {**target, "UploadId": upload}, parts)
    except BaseException as error:
        try:
            call(lambda: client.abort_multipart_upload(**target, UploadId=upload))
        except ClientError as failure:
            if code_of(failure) != "NoSuchUpload":
                error.add_note(f"the unfinished upload of {key} could not be aborted: {failure}")
        except Exception as failure:
            error.add_note(f"the unfinished upload of {key} could not be aborted: {failure}")
        raise
    found = call(lambda: client.head_object(**target))
    held = field(found, "ContentLength", where)
    if held != size:
        call(lambda: client.delete_object(**target))
        raise StoreError(
            f"the server put {key} together wrongly: {held} bytes instead of {size}", object=key
        )
    return str(found.get("ETag", ""))


def abort_stale(client: Any, call: Caller, bucket: str, base: str, older_than: float) -> int:
    """Abort criuctl's uploads below `base` that began `older_than` seconds ago or more.

    Returns how many. Other programs may keep objects there, too, above all where `base` is the
    whole bucket: their uploads are left alone.
    """
    where = client.meta.endpoint_url
    more: dict[str, str] = {}
    aborted = 0
    while True:
        try:
            page = call(partial(client.list_multipart_uploads, Bucket=bucket, Prefix=base, **more))
        except ClientError as error:
            if code_of(error) == "NoSuchUpload":  # rclone's answer for none
                return aborted
            raise
        for upload in page.get("Uploads", []):
            ours = field(upload, "Key", where).removeprefix(base).startswith(_LARGE)
            if ours and time.time() - field(upload, "Initiated", where).timestamp() >= older_than:
                target = {
                    "Bucket": bucket,
                    "Key": upload["Key"],
                    "UploadId": field(upload, "UploadId", where),
                }
                call(partial(client.abort_multipart_upload, **target))
                aborted += 1
        if not page.get("IsTruncated"):
            return aborted
        following = {
            name: field(page, f"Next{name}", where) for name in ("KeyMarker", "UploadIdMarker")
        }
        if following == more:
            raise not_s3(where, "its listing never ends")
        more = following


def _send_parts(
    client: Any,
    call: Caller,
    upload: dict[str, str],
    views: list[memoryview],
    size: int,
    threads: int,
) -> list[dict[str, Any]]:
    stop = threading.Event()

    def send(number: int, part: list[memoryview]) -> dict[str, Any]:
        digest: dict[str, str] = {}

        def attempt() -> Any:
            if stop.is_set():
                raise _Stopped
            try:
                return client.upload_part(
                    **upload, PartNumber=number, Body=ViewReader(part), **digest
                )
            except ClientError as error:
                if digest or not digest_wanted(error):
                    raise
                digest["ContentMD5"] = md5_of(part)
                return attempt()

        try:
            answer = call(attempt, size=sum(view.nbytes for view in part))
            return {"PartNumber": number, "ETag": field(answer, "ETag", client.meta.endpoint_url)}
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="s3-part") as pool:
        try:
            parts = in_parts(views, size)
            futures = [pool.submit(send, number, part) for number, part in enumerate(parts, 1)]
            failed = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for error in failed:
        if not isinstance(error, _Stopped):  # the others were only asked to stop
            raise error
    return [future.result() for future in futures]


def _complete(
    client: Any, call: Caller, upload: dict[str, str], parts: list[dict[str, Any]]
) -> None:
    attempts = 0

    def attempt() -> None:
        nonlocal attempts
        attempts += 1
        try:
            client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except ClientError as error:
            # Completed by an attempt whose answer was lost: checking the object decides.
            if code_of(error) != "NoSuchUpload" or attempts == 1:
                raise

    call(attempt)
