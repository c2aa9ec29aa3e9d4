"""Requests to one S3 server: boto3's client, retries, and the errors of criuctl.

- Transient failures are retried with growing, jittered pauses and a ceiling (tenacity; botocore's
  own retries are off, because they do not cover the reading of bodies).  A server that has never
  answered is given up after about ten seconds, or the first ``s3_timeout`` if it accepts
  connections: a wrong address, or a server that hangs, is likelier than a passing fault.
- Each request ends in time, its attempts, pauses and a slow body included; see `s3_deadline`.
- botocore's errors, and answers that are not S3's, become criuctl's errors (`s3_errors`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential, wait_random

from ..config import Config
from ..errors import ConfigError, StoreError
from .s3_client import make_client
from .s3_deadline import Limit, limited
from .s3_errors import (
    FOREIGN,
    TookTooLong,
    field,
    is_transient,
    not_s3,
    status_of,
    store_error,
    unanswered,
)

T = TypeVar("T")

# seconds before another attempt: first, ceiling, random part
_PAUSE, _PAUSE_MAX, _JITTER = 0.25, 10.0, 0.5
_FIRST_CONTACT_SECONDS, _FIRST_CONTACT_ATTEMPTS = 8.0, 3


class Requests:
    """Requests for the place `url`; may be used from all threads."""

    def __init__(self, url: str, config: Config) -> None:
        self._url, self._config = url, config
        self._lock = threading.Lock()
        self._made: Any = None
        self._answered = False  # whether the server ever did

    @property
    def client(self) -> Any:
        """boto3's client, made at first use; its clients may be used from all threads."""
        with self._lock:
            if self._made is None:
                with self.mapped_settings():
                    self._made = make_client(self._config)
            return self._made

    @property
    def where(self) -> str:
        """The place and the server's address, for messages."""
        return f"{self._url} at {self.client.meta.endpoint_url}"

    def field(self, answer: dict[str, Any], name: str) -> Any:
        """Return a field of an answer; raise `StoreError` if the answer is not S3's."""
        return field(answer, name, self.where)

    def close(self) -> None:
        """Close the client; the next request makes another."""
        with self._lock:
            if self._made is not None:
                self._made.close()
                self._made = None

    @contextmanager
    def mapped_settings(self) -> Iterator[None]:
        """Map the errors of settings that no client can be made of."""
        try:
            yield
        except FOREIGN as error:
            raise store_error(
                error, "preparing the connection", self._url, self._config.s3_endpoint or "S3"
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
    def mapped(self, doing: str, name: str = "") -> Iterator[None]:
        """Map botocore's errors; `doing` and the object's `name` are for messages."""
        try:
            yield
        except FOREIGN as error:
            raise store_error(
                error, doing, self._url, self.client.meta.endpoint_url, name
            ) from error
        except ValueError as error:  # a number or a time that boto3 cannot read
            raise not_s3(f"{doing} in {self.where}", str(error)) from error
        except RecursionError as error:
            # botocore looks for a bucket's region by asking again, even where every answer is a
            # redirection.
            raise StoreError(
                f"{doing} in {self._url}: {self.client.meta.endpoint_url} redirects every request",
                hint="Is the endpoint the address of an S3 server?",
            ) from error

    def retry(
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
        with self.mapped(doing, name):
            return self.call(request, also, size)

    def call(
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
