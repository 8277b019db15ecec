"""`leftward explore`: the page, and a model that answers it, for one person on this machine.

Listens on 127.0.0.1 unless told otherwise. Every request must name this server as its Host and, where a page sends it,
as its Origin, so that no other site's page can ask. Of the file system nothing is served but the page's own files. One
question at a time goes to the model; a question that nobody waits for any more is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from leftward.errors import UserError
from leftward.inspection import assets
from leftward.inspection.reading import Cancelled
from leftward.inspection.report import whole_page
from leftward.inspection.trace import Trace, trace
from leftward.language_model import LanguageModel

_MOST_BODY = 1 << 20
_KEPT_TRACES = 8
_KEPT_TOKENS = 8192  # of all traces: a reading of a long text takes hundreds of megabytes
SETTINGS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
_ASKED_EVERY = 0.1  # seconds, whether somebody still waits

_T = TypeVar("_T")


@dataclass
class Explorer:
    """A model, the traces that were made of it, and the lock on both."""

    model: LanguageModel
    name: str
    most_tokens: int = 4096
    """Of prompt and output together."""
    directory: Path | None = None
    traces: OrderedDict[str, Trace] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    follows: bool = False
    """Whether newer weights may come (following.py), so that a page asks again and again."""

    def first(self, prompt: str | Sequence[int], **settings: Any) -> str:
        """Make the trace that a page shows when it opens. Raises: UserError."""
        return self.add(prompt, settings, lambda: False)

    def add(self, prompt: Any, settings: dict[str, Any], cancelled: Callable[[], bool]) -> str:
        """Make a trace and give its name. Raises: UserError, Cancelled."""
        made = trace(
            self.model,
            prompt,
            name=self.name,
            directory=self.directory,
            most_tokens=min(self.most_tokens, self.model.config.max_seq_len),
            cancelled=cancelled,
            **settings,
        )
        key = f"t{1 + int(next(reversed(self.traces), 't0')[1:])}"
        self.traces[key] = made
        while len(self.traces) > 1 and (len(self.traces) > _KEPT_TRACES or self._n_tokens() > _KEPT_TOKENS):
            self.traces.popitem(last=False)
        return key

    def _n_tokens(self) -> int:
        return sum(len(each.subject.ids) for each in self.traces.values() if each.subject is not None)

    def get(self, key: str | None) -> Trace:
        """Raises: UserError."""
        if key is None:
            return next(reversed(self.traces.values()))
        if key not in self.traces:
            raise UserError("this text is forgotten: read it again")
        return self.traces[key]


def app(explorer: Explorer, hosts: Set[str]) -> ASGIApp:
    """The server. `hosts` are the names with their ports that it goes by."""

    async def index(request: Request) -> Response:
        text, policy = assets.served_page()
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    async def file(request: Request) -> Response:
        content = assets.files().get(request.path_params["name"])
        if content is None:
            return _refused("there is no such file", 404)
        return Response(content, media_type=assets.kind(request.path_params["name"]))

    async def part(request: Request) -> Response:
        params = dict(request.query_params)
        key = params.pop("trace", None)

        def answer(cancelled: Callable[[], bool]) -> bytes:
            found = explorer.get(key)
            with _asking(found, cancelled):
                return found.part(request.path_params["name"], **params).to_bytes()

        return Response(await _computed(request, explorer, answer), media_type="application/octet-stream")

    async def new(request: Request) -> Response:
        asked = _asked(await _body(request))

        def answer(cancelled: Callable[[], bool]) -> dict[str, Any]:
            return {"trace": explorer.add(*asked, cancelled)}

        return JSONResponse(await _computed(request, explorer, answer))

    async def report(request: Request) -> Response:
        key = request.query_params.get("trace")

        def answer(cancelled: Callable[[], bool]) -> str:
            found = explorer.get(key)
            with _asking(found, cancelled):
                return whole_page(found)

        text = await _computed(request, explorer, answer)
        return HTMLResponse(text, headers={"Content-Disposition": 'attachment; filename="leftward.html"'})

    async def status(request: Request) -> Response:
        newest = next(reversed(explorer.traces), None)
        return JSONResponse({"trace": newest, "follows": explorer.follows})

    routes = [
        Route("/", index),
        Route("/page/{name:path}", file),
        Route("/api/part/{name}", part),
        Route("/api/trace", new, methods=["POST"]),
        Route("/api/report", report),
        Route("/api/status", status),
    ]
    handlers = {UserError: _mistake, Cancelled: _gone, ClientDisconnect: _gone}
    return _Guard(Starlette(routes=routes, exception_handlers=handlers), hosts)


def serve(explorer: Explorer, host: str, port: int, ready: Callable[[str], None] = lambda url: None) -> None:
    """Answer until Ctrl-C. `ready` is told the address once it listens.

    Raises: UserError: the port is taken.
    """
    import socket

    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror} (--port 0 takes a free one)") from None
        port = listening.getsockname()[1]
        names = {host, "127.0.0.1", "localhost", "[::1]"} if host in ("127.0.0.1", "localhost", "::1") else {host}
        config = uvicorn.Config(app(explorer, {f"{name}:{port}" for name in names}), log_level="warning")
        server = uvicorn.Server(config)
        listening.listen()
        ready(f"http://{'localhost' if host == '127.0.0.1' else host}:{port}/")
        server.run(sockets=[listening])


class _Guard:
    """Lets through what was asked of this server by its own page or by a person, and says so to browsers."""

    _HEADERS = (
        (b"x-content-type-options", b"nosniff"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
    )

    def __init__(self, inner: ASGIApp, hosts: Set[str]) -> None:
        self._inner, self._hosts = inner, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        if headers.get("host") not in self._hosts:
            await _refused("this server goes by another name", 403)(scope, receive, send)
            return
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            await _refused("another site's page may not ask", 403)(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._HEADERS]
            await send(message)

        await self._inner(scope, receive, with_headers)


async def _body(request: Request) -> bytes:
    """Raises: UserError: it is no JSON, or longer than a prompt can be."""
    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        raise UserError("the body must be application/json")
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > _MOST_BODY:
            raise UserError(f"the text is longer than {_MOST_BODY:,} bytes: shorten it")
    return content


def _asked(content: bytes) -> tuple[Any, dict[str, Any]]:
    """The prompt, a text or ids, and the settings. Raises: UserError."""
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError("the body is no JSON") from None
    if not isinstance(given, dict):
        raise UserError("the body is no JSON object")
    prompt = given.pop("prompt", None)
    is_ids = isinstance(prompt, list) and prompt and all(type(token_id) is int for token_id in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise UserError("prompt must be a text or a list of token ids")
    if unknown := [name for name in given if name not in SETTINGS]:
        raise UserError(f"unknown setting {unknown[0][:40]!r}: valid are {', '.join(SETTINGS)}")
    return prompt, {name: value for name, value in given.items() if value is not None}


async def _computed(request: Request, explorer: Explorer, answer: Callable[[Callable[[], bool]], _T]) -> _T:
    """What `answer` computes in a thread, with the model to itself. Raises: Cancelled, as soon as nobody waits."""
    gone = threading.Event()

    def alone() -> _T:
        with explorer.lock:
            if gone.is_set():
                raise Cancelled
            return answer(gone.is_set)

    working = asyncio.ensure_future(asyncio.to_thread(alone))
    try:
        while not working.done():
            await asyncio.wait({working}, timeout=_ASKED_EVERY)
            if not working.done() and await request.is_disconnected():
                gone.set()
    finally:
        gone.set()
    return await working


@contextlib.contextmanager
def _asking(asked: Trace, cancelled: Callable[[], bool]) -> Iterator[None]:
    """While the trace computes, it looks whether somebody still waits."""
    if asked.subject is not None:
        asked.subject.cancelled = cancelled
    try:
        yield
    finally:
        if asked.subject is not None:
            asked.subject.cancelled = lambda: False


def _refused(why: str, status: int) -> Response:
    return JSONResponse({"error": why}, status)


async def _mistake(request: Request, error: Exception) -> Response:
    return _refused(str(error), 400)


async def _gone(request: Request, error: Exception) -> Response:
    return _refused("nobody waits for it any more", 499)
