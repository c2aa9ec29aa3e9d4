"""What of a guest's requests reaches the session's holder.

A guest speaks the holder's protocol (PROTOCOL.md of the session). Its name, kind and role are not
for it to say, and only what a terminal needs passes: each request is built again from the keys that
are known here. Whatever is added to the protocol later is refused until it is added here. The
holder enforces the role as well.
"""

from __future__ import annotations

from typing import Any

from ..session import protocol

ROLES = ("observe", "write")

_OBSERVE: dict[str, tuple[str, ...]] = {
    "status": (),
    "attach": ("from", "answers"),
    "detach": (),
    "read": ("from", "to", "max"),
    "screen": (),
    "heartbeat": (),
    "cancel": ("request",),
    "bye": (),
}
_WRITE: dict[str, tuple[str, ...]] = {
    **_OBSERVE,
    "attach": ("from", "answers", "size", "write"),
    "input": ("text", "base64"),
    "resize": ("rows", "cols", "xpixel", "ypixel"),
    "lease-yield": (),
}


class Refusal(Exception):
    """A request does not pass; `answer` is the guest's."""

    def __init__(self, request: object, message: str) -> None:
        super().__init__(message)
        number = request if isinstance(request, int) else None
        self.answer = {"id": number, "error": {"code": "forbidden", "message": message}}


class Filter:
    """The requests of one connection of a guest."""

    def __init__(self, name: str, role: str) -> None:
        """`name` is that under which the session's log has what this guest does."""
        self._name, self._role = name, role
        self._allowed = _WRITE if role == "write" else _OBSERVE
        self.greeting: int | None = None  # the id of the request `hello`

    def frame(self, kind: int, body: bytes, known: tuple[str, str] | None) -> bytes:
        """Return the frame for the holder in place of the guest's.

        `known` are operator and token of this guest's connection before. `Refusal`;
        `protocol.ProtocolError` for what is no request at all.
        """
        if kind == protocol.INPUT:
            request, data = protocol.parse_input(body)
            if self._role != "write":
                raise Refusal(request, "this share may only look")
            return protocol.input_frame(request, data)
        if kind != protocol.JSON:
            raise protocol.ProtocolError("a frame that no client sends")
        message = protocol.parse_json(body)
        number, op = message.get("id"), message.get("op")
        if not isinstance(number, int) or isinstance(number, bool):
            raise protocol.ProtocolError("a request without a number")
        if op == "hello":
            return protocol.json_frame(self._hello(number, message, known))
        keys = self._allowed.get(op) if isinstance(op, str) else None
        if keys is None:
            raise Refusal(number, "this share does not allow that")
        kept = {key: message[key] for key in keys if key in message}
        return protocol.json_frame({"id": number, "op": op, **kept})

    def _hello(
        self, number: int, message: dict[str, Any], known: tuple[str, str] | None
    ) -> dict[str, Any]:
        if self.greeting is not None:
            raise Refusal(number, "hello was said")
        self.greeting = number
        role = "observe" if message.get("role") == "observe" else self._role
        hello = {"id": number, "op": "hello", "kind": "human", "role": role}
        hello["name"] = self._name
        if known is not None and (message.get("operator"), message.get("token")) == known:
            hello["operator"], hello["token"] = known
        return hello
