"""A small server of tokens: ``token_server.py FOLDER PORT``; HTTP on the loopback address.

``POST /CONVERSATION?COUNT`` with token numbers, separated by blanks, as body: they are appended to
the conversation, COUNT tokens are generated, and answered.  The keys and values of every
conversation stay on the device between requests, in one preallocated cache that is cut in blocks,
as inference servers do it.
"""

from __future__ import annotations

import http.server
import sys
import threading
from typing import Any

import torch
import torch_common as common
from steplog import DEVICE, Steps, note

VOCABULARY, WIDTH, BLOCK, BLOCKS = 509, 128, 16, 4096


class Model:
    """One layer of attention over a cache in blocks, with random weights."""

    def __init__(self) -> None:
        common.deterministic()
        self.embedding = torch.randn(VOCABULARY, WIDTH).to(DEVICE)
        self.query, self.key, self.value = (torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5).to(DEVICE)
        self.keys = torch.zeros(BLOCKS, BLOCK, WIDTH, device=DEVICE)
        self.values = torch.zeros(BLOCKS, BLOCK, WIDTH, device=DEVICE)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.free = list(range(BLOCKS))
        note(device_bytes=2 * self.keys.numel() * 4)

    def _append(self, name: str, token: int) -> Any:
        table, length = self.tables.setdefault(name, []), self.lengths.get(name, 0)
        if length % BLOCK == 0:
            table.append(self.free.pop(0))
        state = self.embedding[token]
        self.keys[table[-1], length % BLOCK] = state @ self.key
        self.values[table[-1], length % BLOCK] = state @ self.value
        self.lengths[name] = length + 1
        rows = torch.tensor(table, device=DEVICE)
        keys = self.keys[rows].reshape(-1, WIDTH)[: length + 1]
        values = self.values[rows].reshape(-1, WIDTH)[: length + 1]
        weights = torch.softmax(keys @ (state @ self.query) / WIDTH**0.5, 0)
        return (state + weights @ values) @ self.embedding.T

    def generate(self, name: str, prompt: list[int], count: int) -> list[int]:
        """`count` tokens after the conversation so far and `prompt`."""
        tokens: list[int] = []
        for token in prompt[:-1]:
            self._append(name, token)
        token = prompt[-1] if prompt else self.last[name]
        for _ in range(count):
            token = int(self._append(name, token).argmax())
            tokens.append(token)
        self.last[name] = token
        return tokens


class Handler(http.server.BaseHTTPRequestHandler):
    """One request; the model takes them one at a time."""

    model: Model
    lock = threading.Lock()

    def do_POST(self) -> None:
        """Generate."""
        name, _, count = self.path.lstrip("/").partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        with self.lock:
            tokens = self.model.generate(name, [int(word) for word in body.split()], int(count))
        answer = " ".join(map(str, tokens)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


def main() -> None:
    """Serve until asked to stop."""
    Handler.model = Model()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    steps = Steps()
    for number in steps:
        steps.log(number, b"%d" % number)


if __name__ == "__main__":
    main()
