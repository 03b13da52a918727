"""Serves a live page on this host only: read-only, GET only, and only to those who know the address."""

from __future__ import annotations

import hmac
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec

from fleetbed.analysis.page.watching import Watched
from fleetbed.profiles.errors import BadInput

HOST = "127.0.0.1"


class LiveServer(ThreadingHTTPServer):
    """The address contains a token, so that other users of this host cannot read the page by guessing the port."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        self.watched = watched
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise BadInput(f"--port {port}: cannot listen there ({error.strerror}); choose another port.") from error

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"{name}:{self.server_address[1]}" for name in (HOST, "localhost"))

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0]}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version = "fleetbed"
    sys_version = ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token, _, name = address.path.lstrip("/").partition("/")
        # another host's name in the request would be a page elsewhere that was pointed at this address
        if self.headers.get("Host") not in self.server.hosts or not hmac.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            self._refuse(HTTPStatus.NOT_FOUND)
        elif name == "":
            self._answer(self.server.watched.page().encode(), "text/html")
        elif name == "state":
            known = parse_qs(address.query).get("known", [""])[0]
            state = self.server.watched.state(int(known) if known.isdecimal() and len(known) < 12 else None)
            self._answer(msgspec.json.encode(state), "application/json")
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _not_allowed(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _not_allowed

    def _refuse(self, status: HTTPStatus) -> None:
        self._answer(f"{status.phrase}\n".encode(), "text/plain", status)

    def _answer(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the address holds the token."""
