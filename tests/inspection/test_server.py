"""The page's server: it answers its own page, and nobody and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from explored import explorer, listening
from starlette.testclient import TestClient

from leftward.inspection.part import Part
from leftward.inspection.reading import Cancelled
from leftward.inspection.server import Explorer, app, serve

HOST = "localhost:8765"
FORBIDDEN = ("Math.random", "getRandomValues", "innerHTML", "insertAdjacentHTML", "eval(", "https://", "@import")


@pytest.fixture(scope="module")
def explored() -> Explorer:
    return explorer()


@pytest.fixture
def client(explored: Explorer) -> Iterator[TestClient]:
    with TestClient(app(explored, {HOST}), base_url=f"http://{HOST}") as made:
        yield made


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "importmap" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy
    for name in ("main.js", "steps/mask.js", "style.css"):
        answer = client.get(f"/page/{name}")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        *("../server.py", "..%2fserver.py", "%2e%2e/%2e%2e/errors.py", "/etc/passwd", "steps/../../part.py", ""),
        *("absent.js", "__init__.py", "steps"),
    ],
)
def test_nothing_of_the_file_system_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/page/{path}").status_code == 404


def test_parts(client: TestClient) -> None:
    part = Part.from_bytes(client.get("/api/part/attention?layer=1&head=2").content)
    assert part.params == {"layer": 1, "head": 2} and part.arrays["weights"].shape == (30, 30)
    for query, wanted in (
        ("attention?layer=9&head=0", "layer is 9"),
        ("attention?layer=x&head=0", "layer is x"),
        ("attention", "needs layer, head"),
        ("secrets", "no part 'secrets'"),
        ("about?trace=t999", "forgotten"),
    ):
        answer = client.get(f"/api/part/{query}")
        assert answer.status_code == 400 and wanted in answer.json()["error"]


def test_another_text_and_a_branch(client: TestClient) -> None:
    made = client.post("/api/trace", json={"prompt": "the dog", "max_tokens": 3, "seed": 2}).json()["trace"]
    about = Part.from_bytes(client.get(f"/api/part/about?trace={made}").content).data
    assert about["prompt"].endswith("the dog") and about["sampling"]["seed"] == 2
    ids = [token["id"] for token in about["tokens"]]
    branch = client.post("/api/trace", json={"prompt": [*ids[:5], ids[2]], "max_tokens": 2}).json()["trace"]
    tokens = Part.from_bytes(client.get(f"/api/part/about?trace={branch}").content).data["tokens"]
    assert [token["id"] for token in tokens[:6]] == [*ids[:5], ids[2]]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"prompt": "the " * 40}, "more than the 64 allowed"),
        ({"prompt": "the", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "the", "path": "/etc"}, "unknown setting 'path'"),
        ({"prompt": 5}, "a text or a list"),
        ({"prompt": [True]}, "a text or a list"),
        ({"prompt": [10**30]}, "token id"),
        ({"prompt": ["the"]}, "a text or a list"),
        ([], "no JSON object"),
        ({"prompt": "Ж"}, "write"),
    ],
)
def test_what_cannot_be_read(client: TestClient, body: Any, wanted: str) -> None:
    answer = client.post("/api/trace", json=body)
    assert answer.status_code == 400 and wanted in answer.json()["error"]


def test_bodies_are_bounded_and_json(client: TestClient) -> None:
    assert client.post("/api/trace", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert client.post("/api/trace", data={"prompt": "the"}).status_code == 400  # what a foreign form can send
    large = b'{"prompt": "' + b"a" * (2 << 20) + b'"}'
    assert "longer" in client.post("/api/trace", content=large, headers={"content-type": "application/json"}).text
    assert (
        client.post("/api/trace", content=b"[" * 100_000, headers={"content-type": "application/json"}).status_code
        == 400
    )


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "localhost", "localhost:8766", "127.0.0.1:1"])
def test_another_host_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403
    assert client.get("/api/part/about", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "https://localhost:8765", "null", "http://localhost:1"])
def test_another_origin_is_refused(client: TestClient, origin: str) -> None:
    answer = client.post("/api/trace", json={"prompt": "the"}, headers={"origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert client.post("/api/trace", json={"prompt": "the"}, headers={"origin": f"http://{HOST}"}).status_code == 200


def test_only_so_many_texts_are_kept(client: TestClient, explored: Explorer) -> None:
    for _ in range(10):
        client.post("/api/trace", json={"prompt": "the", "max_tokens": 1})
    assert len(explored.traces) == 8
    newest = next(reversed(explored.traces))
    assert client.get("/api/status").json() == {"trace": newest, "follows": False}


def test_a_report_of_what_is_shown(client: TestClient) -> None:
    answer = client.get("/api/report")
    assert answer.status_code == 200 and 'data-part="about"' in answer.text


def test_whoever_leaves_is_not_computed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ended = explorer(), threading.Event()

    def slow(self: Explorer, prompt: Any, settings: dict[str, Any], cancelled: Any) -> str:
        while not cancelled():
            time.sleep(0.01)
        ended.set()
        raise Cancelled

    monkeypatch.setattr(Explorer, "add", slow)
    with listening(made) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}api/trace", json={"prompt": "the"}, timeout=0.3)
        assert ended.wait(10)
        assert httpx.get(f"{url}api/part/about").status_code == 200  # the model is free again


def test_a_port_that_is_taken(explored: Explorer) -> None:
    from leftward.errors import UserError

    with listening(explored) as url:
        with pytest.raises(UserError, match="cannot listen on 127.0.0.1"):
            serve(explored, "127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))


def test_the_page_is_small_and_shows_no_invented_number() -> None:
    """No file of it draws random numbers, makes markup of text, or names another site."""
    root = Path(__file__).parents[2] / "src" / "leftward" / "inspection" / "page"
    found = [path for path in root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in found) < 200_000
    for path in found:
        text = path.read_text(encoding="utf-8")
        for forbidden in (
            "Math.random",
            "getRandomValues",
            "innerHTML",
            "insertAdjacentHTML",
            "eval(",
            "https://",
            "@import",
        ):
            assert forbidden not in text, (path.name, forbidden)
        assert text.replace("http://www.w3.org/2000/svg", "").count("http://") == 0, path.name
