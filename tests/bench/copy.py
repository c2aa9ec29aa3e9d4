"""The command that copies a file to or from S3 by hand: ``python -m bench.copy put|get FILE BUCKET
KEY``.

boto3's own transfer manager (parts of 8 MiB, ten at a time), which is what ``aws s3 cp`` is, in a
process that loads nothing else; endpoint and credentials come from the environment.
"""

from __future__ import annotations

import sys

import boto3


def main() -> None:
    """Copy one file."""
    verb, file, bucket, key = sys.argv[1:]
    client = boto3.client("s3")
    if verb == "put":
        client.upload_file(file, bucket, key)
    else:
        client.download_file(bucket, key, file)


if __name__ == "__main__":
    main()
