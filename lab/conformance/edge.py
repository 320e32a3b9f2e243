"""The edge: pages of other origins, encodings of bodies, credentials, old and unusual clients."""

import gzip
import json
import zlib

from lab.conformance.case import case, need
from lab.conformance.rig import CHAT, Rig, body_of

_PAGE = "https://page.example"
_BOMB_S = 10.0


@case("other-origins-kept-out", seen="ollama CVE-2024-28224, CWE-346")
async def origins(rig: Rig) -> None:
    """A body that any web page can send unasked (no JSON type) reaches no backend, and no page may read an answer."""
    script = rig.script()
    body = json.dumps(body_of(script, CHAT)).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = await rig.post(CHAT, body, rig.headers(content_type=kind, origin=_PAGE))
        need(400 <= answer.status < 500, f"a page that sends {kind} got {answer.shown()}")
        need(not rig.seen(script), f"the body of a page that sends {kind} reached a backend")
    answer = await rig.post(CHAT, body, rig.headers(origin=_PAGE))
    allowed = answer.headers.get("access-control-allow-origin")
    need(allowed is None, f"every page may read its answers: the backend's header ({allowed}) came through")


@case("credentials-of-a-proxy", seen="-")
async def credentials(rig: Rig) -> None:
    """Authorization of another scheme (a proxy's Basic) does not hide the key in x-api-key."""
    script = rig.script()
    headers = rig.headers(authorization="Basic dXNlcjpwYXNzd29yZA==", x_api_key=rig.key)
    answer = await rig.post(CHAT, json.dumps(body_of(script, CHAT)).encode(), headers)
    need(answer.status == 200, f"got {answer.shown()}")


@case("compressed-bodies", seen="CWE-409")
async def compressed(rig: Rig) -> None:
    """A gzip or deflate body is decoded, or refused with 415; one that grows a thousandfold is refused."""
    for coding, encode in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        script = rig.script()
        body = json.dumps(body_of(script, CHAT)).encode()
        answer = await rig.post(CHAT, encode(body), rig.headers(content_encoding=coding))
        need(answer.status in {200, 415}, f"{coding}: got {answer.shown()}")
        if answer.status == 200:
            need(bool(rig.seen(script)), f"{coding}: the backend did not get the decoded body")
    bomb = gzip.compress(b" " * (1 << 20)) * 256  # in members, as to compress all of it would hold up the backends
    answer = await rig.post(CHAT, bomb, rig.headers(content_encoding="gzip"))
    need(400 <= answer.status < 500, f"a body that grows from {len(bomb)} bytes to 256 MiB got {answer.shown()}")
    need(answer.seconds < _BOMB_S, f"that took {answer.seconds:.1f} s")


CASES = (origins, credentials, compressed)
