"""A web server that counts its requests in memory only. The quickstart dumps and restores it.

It listens on a free port of 127.0.0.1, says which on its first line of output, and answers every
GET with the number of requests so far.
"""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer

count = 0


class Counter(BaseHTTPRequestHandler):
    """Count the GET requests."""

    def do_GET(self) -> None:
        """Count the request, and answer with the count."""
        global count
        count += 1
        body = f"{count}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Counter)
    print(server.server_address[1], flush=True)
    server.serve_forever()
