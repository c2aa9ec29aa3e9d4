"""CRIU's protobuf messages for tests that make images by hand."""

from __future__ import annotations

from typing import Any


def filled(message: Any, **values: Any) -> Any:
    """With every required number 0 that is not given."""
    for field in message.DESCRIPTOR.fields:
        if field.name in values:
            setattr(message, field.name, values[field.name])
        elif (
            field.is_required
            if hasattr(field, "is_required")
            else field.label == field.LABEL_REQUIRED
        ):
            setattr(message, field.name, 0)
    return message
