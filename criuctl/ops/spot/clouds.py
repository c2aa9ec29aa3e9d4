"""The cloud that this machine is of: named, or found out by asking the metadata service."""

from __future__ import annotations

from ...errors import UsageError
from .aws import Aws
from .azure import Azure
from .gcp import Gcp
from .metadata import ADDRESS, Metadata
from .notices import Cloud

# The first two prove themselves in their answers: Google by a header, Amazon by its token.
_KINDS: dict[str, type[Gcp] | type[Aws] | type[Azure]] = {"gcp": Gcp, "aws": Aws, "azure": Azure}
NAMES = (*sorted(_KINDS), "auto")


def chosen(name: str, url: str = ADDRESS) -> Cloud:
    """Return the cloud called `name`; `auto` is the one whose service answers at `url`,
    `UsageError` if none does.
    """
    metadata = Metadata.at(url)
    if name != "auto":
        return _KINDS[name](metadata)
    for kind in _KINDS.values():
        cloud = kind(metadata)
        if cloud.present():
            return cloud
    raise UsageError(
        f"no cloud's metadata service answers at {url}",
        hint="Is this a machine of AWS, Google or Azure? Name it: `--cloud aws`.",
    )
