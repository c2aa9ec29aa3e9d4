"""The other side of a link as a separate process: answers over its standard streams."""

from __future__ import annotations

import os
import threading

from criuctl.transport.link import Answer, Link, Request


def serve(request: Request) -> Answer:
    """Echo, or never answer."""
    if request.verb == "hang":
        threading.Event().wait()
    return Answer(request.arguments, request.body)


if __name__ == "__main__":
    link = Link(os.dup(0), os.dup(1), serve, name="parent", facts={"pid": os.getpid()})
    for fd in (0, 1):
        os.close(fd)
    link.start()
    link.lost.wait()
    link.close()
