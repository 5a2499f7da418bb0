"""Which web pages may call: CORS for named origins, and host names that are the server's own."""

import asyncio

import httpx
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.catalogue import Catalogue
from throughline.inference.serving.keys import Key
from throughline.inference.serving.server import Server, build_app


def test_only_pages_of_named_origins_may_call() -> None:
    """CORS: off unless asked for; a browser's question before a call needs no key, and an error tells the page
    what it is.
    """
    page, other = {"Origin": "https://page.example"}, {"Origin": "https://other.example"}
    preflight = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    allowed = "access-control-allow-origin"

    async def ask(origins: tuple[str, ...]) -> list[httpx.Response]:
        app = build_app(
            Server(Catalogue([]), ServerLimits(), Telemetry()), keys=[Key.of("key")], origins=origins
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [
                await client.options("/v1/completions", headers=preflight),
                *[await client.get("/v1/models", headers=given) for given in (page, other)],
                await client.get("/v1/models", headers=page | {"Authorization": "Bearer key"}),
            ]

    before, refused, elsewhere, answered = asyncio.run(ask(("https://page.example",)))
    assert before.status_code == 200 and before.headers[allowed] == "https://page.example"
    assert {"authorization", "content-type"} <= set(
        before.headers["access-control-allow-headers"].lower().split(", ")
    )
    assert refused.status_code == 401 and refused.headers[allowed] == "https://page.example"
    assert answered.status_code == 200 and answered.headers[allowed] == "https://page.example"
    assert allowed not in elsewhere.headers
    assert all(allowed not in answer.headers for answer in asyncio.run(ask(())))


def test_a_name_that_is_not_ours_is_refused_and_head_is_answered() -> None:
    """DNS rebinding: a page of evil.example, whose name leads to this machine, asks with its own name."""

    async def ask() -> list[int]:
        app = build_app(
            Server(Catalogue([]), ServerLimits(), Telemetry()), hosts=("localhost", "127.0.0.1", "[::1]")
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost:81"
        ) as client:
            hosts = (
                "localhost:81",
                "LOCALHOST",
                "[::1]:80",
                "127.0.0.1:9",
                "evil.example",
                "localhost.evil.example",
                "",
            )
            found = [await client.get("/health", headers={"Host": host}) for host in hosts]
            return [answer.status_code for answer in [*found, await client.head("/health")]]

    assert asyncio.run(ask()) == [200] * 4 + [403] * 3 + [200]
