"""The one question that every client asks in every round, answered before the framework is asked.

Routing and validation cost as much as the signature check. A plain request for neighbours in a round that is in
memory is answered here; everything else, and every doubt, is passed on to the application, which checks it all.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

from niss.protocol.beacon import LINKS_PER_ROUND
from niss.tracker.gate import CALLER, App, Receive, Scope, Send
from niss.tracker.refusal import Refusal
from niss.tracker.service import Tracker

NEIGHBOURS_ROUTE = "/v1/runs/{run}/rounds/{round}/attempts/{attempt}/neighbours"
_PATH = re.compile(rb"/v1/runs/((?:[0-9a-f]{2}){1,64})/rounds/([0-9]{1,5})/attempts/([0-9])/neighbours")
_ROUTE = SimpleNamespace(path=NEIGHBOURS_ROUTE)


class HotPath:
    """ASGI middleware right before the application; it refuses nothing itself."""

    def __init__(self, app: App, tracker: Tracker) -> None:
        self._app, self._tracker = app, tracker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._answer(scope)
        if body is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, scope: Scope) -> bytes | None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["query_string"]:
            return None
        found = _PATH.fullmatch(scope["raw_path"])
        if found is None or int(found[3]) >= LINKS_PER_ROUND:
            return None
        run = bytes.fromhex(found[1].decode())
        view = self._tracker.rounds.final_view(run, int(found[2]), int(found[3]))
        if view is None:
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            signed = self._tracker.check(headers, method="GET", target=scope["raw_path"], body=b"")
            if not view.has_seat(signed.identity):
                return None
            scope[CALLER] = signed.identity
            return view.neighbours_json(signed.identity)
        except Refusal:
            return None
