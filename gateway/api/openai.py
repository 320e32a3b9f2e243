"""``/v1``: OpenAI's routes as one raw ASGI app. Every failure below it leaves as OpenAI's envelope."""

import logging

import msgspec

from gateway.admission import Authenticator
from gateway.api.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from gateway.errors import ApiError, MethodNotAllowedError, NotFoundError, envelope
from gateway.pipeline import Pipeline
from gateway.registry import Registry
from gateway.types import Operation

_OPERATIONS = {
    "/v1/chat/completions": Operation.CHAT,
    "/v1/completions": Operation.COMPLETIONS,
}
_MODELS = "/v1/models"

_log = logging.getLogger(__name__)


class OpenAiApi:
    """Dispatches by path and method; inference goes down the pipeline."""

    def __init__(
        self, *, pipeline: Pipeline, authenticator: Authenticator, registry: Registry, send_timeout_s: float
    ) -> None:
        self._pipeline = pipeline
        self._authenticator = authenticator
        self._registry = registry
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"/v1 speaks HTTP, not {scope['type']}")
        exchange = Exchange(scope, receive, send, send_timeout_s=self._send_timeout_s)
        try:
            await self._dispatch(exchange)
        except ClientGoneError:
            return
        except ApiError as error:
            await exchange.refuse(error)
        except Exception:
            _log.exception("unexpected failure on %s", exchange.path)
            if exchange.started:
                raise  # the server closes the connection: the client sees a broken answer, not a short one
            await exchange.reply(500, envelope("the gateway failed", kind="server_error", code="internal_error"))

    async def _dispatch(self, exchange: Exchange) -> None:
        operation = _OPERATIONS.get(exchange.path)
        if operation is not None:
            _only(exchange, "POST")
            await self._pipeline.serve(operation, exchange)
        elif exchange.path == _MODELS or exchange.path.startswith(_MODELS + "/"):
            _only(exchange, "GET")
            self._authenticator.authenticate(exchange.header(b"authorization"))
            await self._models(exchange)
        else:
            raise NotFoundError(f"there is no {exchange.path} here", code="unknown_route")

    async def _models(self, exchange: Exchange) -> None:
        cards = self._registry.model_cards()
        name = exchange.path.removeprefix(_MODELS).removeprefix("/")
        if not name:
            await exchange.reply(200, msgspec.json.encode({"object": "list", "data": cards}))
            return
        card = next((card for card in cards if card.get("id") == name), None)
        if card is None:
            raise NotFoundError(f"the model {name!r} does not exist", param="model", code="model_not_found")
        await exchange.reply(200, msgspec.json.encode(card))


def _only(exchange: Exchange, method: str) -> None:
    if exchange.method != method:
        raise MethodNotAllowedError(f"{exchange.path} takes {method}, not {exchange.method}")


__all__ = ["OpenAiApi"]
