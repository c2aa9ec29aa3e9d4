"""Buckets that keep deleted objects: versions, and locks on them.

In a bucket with versioning a delete only hides an object; in one with object lock, which needs
versioning, no user can remove the hidden version before its time. Both free the space by their own
rules, so criuctl deletes as elsewhere, never a version, and reports what is still kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from .base import Keeping

Caller = Callable[[Callable[[], Any]], Any]


def keeping(client: Any, call: Caller, bucket: str, base: str) -> Keeping | None:
    """Return what the bucket keeps of deleted objects below the prefix `base`.

    None where the server does not say or does not permit the request.
    """
    try:
        versions = "Status" in call(lambda: client.get_bucket_versioning(Bucket=bucket))
    except ClientError:
        return None
    if not versions:
        return Keeping()
    count = size = 0
    try:
        for page in client.get_paginator("list_object_versions").paginate(
            Bucket=bucket, Prefix=base
        ):
            for item in page.get("Versions", []):
                if not item.get("IsLatest"):
                    count, size = count + 1, size + item.get("Size", 0)
    except ClientError:
        return Keeping(versions=True, lock=_lock(client, call, bucket))
    return Keeping(True, _lock(client, call, bucket), count, size)


def _lock(client: Any, call: Caller, bucket: str) -> str:
    """Return how long, and how strictly, versions are locked by default.

    ``governance 30 days``; '' for not at all.
    """
    try:
        found = call(lambda: client.get_object_lock_configuration(Bucket=bucket))[
            "ObjectLockConfiguration"
        ]
    except (ClientError, KeyError):
        return ""
    rule = found.get("Rule", {}).get("DefaultRetention", {})
    span = (
        f"{rule['Days']} days"
        if "Days" in rule
        else f"{rule['Years']} years"
        if "Years" in rule
        else ""
    )
    return f"{rule.get('Mode', '').lower()} {span}".strip() or "single objects"
