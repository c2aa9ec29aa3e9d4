"""Map botocore's errors to criuctl's, and decide which may pass by themselves.

The seam between botocore's exceptions and the error tree: `store_error` maps, `is_transient` says
whether another attempt is useful, `unanswered` whether there was any answer. Imported only together
with botocore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore import exceptions as b
from botocore.parsers import ResponseParserError

from ..errors import (
    ConfigError,
    CriuctlError,
    Damaged,
    NoSuchBucket,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from .base import is_probe

# What boto3 raises for requests, including errors while a client is made.
FOREIGN = (b.BotoCoreError, b.ClientError, ResponseParserError)


class TookTooLong(b.BotoCoreError):  # type: ignore[misc]
    """A request was given up because of its total time."""

    fmt = "not done after {seconds:.3g} s: {error}"


_NOT_REACHED = (b.EndpointConnectionError, b.ConnectTimeoutError, b.ProxyConnectionError)
_CUT = (
    *_NOT_REACHED,
    b.ConnectionClosedError,
    b.ReadTimeoutError,
    b.ResponseStreamingError,
    b.IncompleteReadError,
    b.HTTPClientError,
    b.SSLError,
)
_TRANSIENT_STATUS = frozenset({429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",  # the body was changed on its way
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "XAmzContentSHA256Mismatch",  # the same, detected by the signature
    }
)
_FULL_CODES = frozenset(
    {"InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioStorageFull"}
)
_DENIED_HINTS = {
    "InvalidAccessKeyId": "The server does not know this access key: check AWS_ACCESS_KEY_ID or "
    "the profile.",
    "SignatureDoesNotMatch": (
        "The secret key does not belong to the access key: check AWS_SECRET_ACCESS_KEY or the "
        "profile."
    ),
    "RequestTimeTooSkewed": "This host's clock is wrong: set it (NTP).",
    "ExpiredToken": "The session token has expired: fetch new credentials.",
    "InvalidToken": "The session token is not valid: fetch new credentials.",
    "AccessDenied": "These credentials may not do this: check the bucket's policy and the user's "
    "rights.",
}
_NO_CREDENTIALS = (
    b.NoCredentialsError,
    b.PartialCredentialsError,
    b.CredentialRetrievalError,
    b.ProfileNotFound,
)


def code_of(error: BaseException) -> str:
    """Return S3's code of the failure, such as ``NoSuchKey``; '' without an answer."""
    return (
        str(error.response.get("Error", {}).get("Code", ""))
        if isinstance(error, b.ClientError)
        else ""
    )


def status_of(error: BaseException) -> int:
    """Return the HTTP status of the answer, or 0 when there was none."""
    return (
        int(error.response["ResponseMetadata"].get("HTTPStatusCode", 0))
        if isinstance(error, b.ClientError)
        else 0
    )


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may well succeed a moment later."""
    if isinstance(error, b.ClientError):
        return not _is_full(error) and (
            status_of(error) in _TRANSIENT_STATUS or code_of(error) in _TRANSIENT_CODES
        )
    return isinstance(error, _CUT) and not _bad_certificate(error)


def unanswered(error: BaseException) -> bool:
    """Return whether no connection was made, or nothing came over it."""
    return isinstance(error, (*_NOT_REACHED, b.ReadTimeoutError))


def digest_wanted(error: BaseException) -> bool:
    """Return whether the server refused a body without Content-MD5, as those with object lock
    do.
    """
    return (
        isinstance(error, b.ClientError) and status_of(error) == 400 and "Content-MD5" in str(error)
    )


def condition_failed(error: BaseException) -> bool:
    """Return whether the server reports that a write condition did not hold.

    412, or 409 from AWS when writers race.
    """
    return status_of(error) in (409, 412)


def condition_unknown(error: BaseException) -> bool:
    """Return whether the server reports that it does not support write conditions."""
    return status_of(error) == 501 or code_of(error) == "NotImplemented"


def field(answer: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a part of the answer that every S3 server gives.

    boto3 accepts answers without it.
    """
    try:
        return answer[name]
    except KeyError:
        raise not_s3(where, f"it lacks {name}") from None


def not_s3(where: str, why: str) -> StoreError:
    """Return the error for an answer that no S3 server gives."""
    return StoreError(
        f"{where}: the answer is not S3's, {why}",
        hint="Is the endpoint the address of an S3 server?",
    )


def store_error(
    error: Exception, doing: str, where: str, endpoint: str, name: str = ""
) -> CriuctlError:
    """Return criuctl's error for a botocore `error` during `doing` in the store `where`."""
    if is_probe(name):
        doing, name = doing.replace(name, "a test object"), ""
    text = f"{doing} in {where} at {endpoint}"
    details = {"object": name} if name else {}
    if isinstance(error, _NO_CREDENTIALS):
        return StoreDenied(
            f"no credentials for {where}: {error}",
            hint=(
                "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws "
                "(AWS_PROFILE)."
            ),
        )
    if isinstance(error, b.ClientError):
        return _answered(error, text, where, endpoint, details)
    if _bad_certificate(error):
        return StoreUnreachable(
            f"{text}: the server's certificate is not trusted: {error}",
            hint="Name the certificate authority by AWS_CA_BUNDLE.",
        )
    if isinstance(error, TookTooLong):
        return StoreUnreachable(
            f"{text}: {error}",
            hint=(
                "The server, or the network between, is too slow; s3_deadline is what one request "
                "may take."
            ),
        )
    if isinstance(
        error, b.IncompleteReadError | b.ResponseStreamingError
    ) and "IncompleteRead" in repr(error):
        return Damaged(
            f"{text}: the server promises more bytes than it sends, every time: {error}",
            hint="The object was cut on the server, or something between cuts answers short.",
            **details,
        )
    if isinstance(error, _CUT):
        return StoreUnreachable(
            f"{text}: no answer: {error}",
            hint=(
                "Check that the server runs, the endpoint (s3_endpoint, AWS_ENDPOINT_URL) and the "
                "network between."
            ),
        )
    if isinstance(error, ResponseParserError):
        return StoreError(
            f"{text}: the answer is not S3's: {error}",
            hint="Is the endpoint the address of an S3 server?",
        )
    if isinstance(
        error,
        b.ParamValidationError | b.ConfigParseError | b.InvalidConfigError | b.UnknownEndpointError,
    ):
        return ConfigError(f"{text}: {error}")
    return StoreError(f"{text}: {error}")


def _answered(
    error: b.ClientError, text: str, where: str, endpoint: str, details: dict[str, str]
) -> CriuctlError:
    code, status = code_of(error), status_of(error)
    said = error.response["Error"].get("Message") or ""
    text = f"{text}: {code} ({status}{', ' + said if said else ''})"
    if code == "NoSuchBucket":
        return NoSuchBucket(
            f"{where} at {endpoint} does not exist: no such bucket",
            hint="Make the bucket with the server's own tools, or correct the URL.",
        )
    if code == "NoSuchKey":
        return ObjectMissing(text, **details)
    if code == "InvalidRange":
        return Damaged(f"{text}: the object is too short", **details)
    if _is_full(error):
        return StoreFull(
            text, hint="Free space there, raise the quota, or `criuctl prune`, then try again."
        )
    if code in _DENIED_HINTS or status in (401, 403):
        return StoreDenied(text, hint=_DENIED_HINTS.get(code, _DENIED_HINTS["AccessDenied"]))
    if code in (
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "IllegalLocationConstraintException",
    ):
        return StoreError(
            text, hint="The bucket is in another region: set s3_region or AWS_DEFAULT_REGION."
        )
    if is_transient(error):
        return StoreUnreachable(
            text, hint="The server is there but cannot serve now: look at its own log."
        )
    if status == 404:
        return StoreError(text, hint="Is the endpoint the address of an S3 server?")
    return StoreError(text)


def _is_full(error: b.ClientError) -> bool:
    said = str(error.response.get("Error", {}).get("Message") or "")
    return (
        code_of(error) in _FULL_CODES or status_of(error) == 507 or "no space left" in said.lower()
    )


def _bad_certificate(error: BaseException) -> bool:
    return isinstance(error, b.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
