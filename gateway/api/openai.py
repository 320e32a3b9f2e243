"""The routes of inference APIs as one raw ASGI app: OpenAI's, Anthropic's Messages, LMDeploy's ``/generate``.

Every failure below it leaves in the envelope of the route's own API.
"""

import logging

import msgspec

from gateway.admission import Authenticator, keys_of
from gateway.errors import ApiError, MethodNotAllowedError, NotFoundError
from gateway.errors.envelopes import anthropic_envelope, envelope
from gateway.errors.unknown_route import unknown_route
from gateway.http.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from gateway.http.via import Via
from gateway.pipeline import Pipeline
from gateway.registry import Registry
from gateway.registry.missing_model import missing_model
from gateway.requests.paths import PATHS
from gateway.types import Dialect, Operation

_OPERATIONS = {path: operation for operation, path in PATHS.items()}
_MODELS = "/v1/models"
_MESSAGES = PATHS[Operation.MESSAGES]

_log = logging.getLogger(__name__)


def serves(path: str) -> bool:
    """Whether a path is this app's: everything under ``/v1``, and the operations outside of it."""
    return path.startswith("/v1/") or path in _OPERATIONS


def dialect_of(path: str) -> Dialect:
    """Return the API of a path, also of one without a route."""
    operation = _OPERATIONS.get(path)
    if operation is not None:
        return operation.dialect
    return Dialect.ANTHROPIC if path.startswith(_MESSAGES + "/") else Dialect.OPENAI


class OpenAiApi:
    """Dispatches by path and method; inference goes down the pipeline."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        authenticator: Authenticator,
        registry: Registry,
        via: Via,
        send_timeout_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._authenticator = authenticator
        self._registry = registry
        self._via = via
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"/v1 speaks HTTP, not {scope['type']}")
        operation = _OPERATIONS.get(scope["path"])
        dialect = dialect_of(scope["path"])
        exchange = Exchange(scope, receive, send, send_timeout_s=self._send_timeout_s, dialect=dialect)
        try:
            await self._dispatch(operation, exchange)
        except ClientGoneError:
            return
        except ApiError as error:
            await exchange.refuse(error)
        except Exception:
            _log.exception("unexpected failure on %s", operation or _MODELS)
            if exchange.started:
                raise  # the server closes the connection: the client sees a broken answer, not a short one
            await exchange.reply(500, _bug(dialect))

    async def _dispatch(self, operation: Operation | None, exchange: Exchange) -> None:
        if operation is not None:
            if exchange.method != "POST":
                raise MethodNotAllowedError(exchange.path, exchange.method, allowed={"POST"})
            await self._pipeline.serve(operation, exchange)
        elif exchange.path == _MODELS or exchange.path.startswith(_MODELS + "/"):
            if exchange.method != "GET":
                raise MethodNotAllowedError(exchange.path, exchange.method, allowed={"GET", "HEAD"})
            self._via.check(exchange.headers)  # another gateway, or this one, that takes it for an instance
            self._authenticator.authenticate(keys_of(exchange.headers))
            await self._models(exchange)
        else:
            raise NotFoundError(unknown_route(exchange.path), code="unknown_route")

    async def _models(self, exchange: Exchange) -> None:
        if self._registry.checks.unchecked:
            await self._registry.checks.until_all_checked()
        cards = self._registry.models.cards()
        name = exchange.path.removeprefix(_MODELS).removeprefix("/")
        if not name:
            await exchange.reply(200, msgspec.json.encode({"object": "list", "data": cards}))
            return
        card = next((card for card in cards if card.get("id") == name), None)
        if card is None:
            raise missing_model(self._registry, name)
        await exchange.reply(200, msgspec.json.encode(card))


def _bug(dialect: Dialect) -> bytes:
    if dialect is Dialect.ANTHROPIC:
        return anthropic_envelope(500, "the gateway failed")
    return envelope("the gateway failed", kind="server_error", code="internal_error")
