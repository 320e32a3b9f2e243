"""``/admin/v1/routing``: the routing policy, changed at run time; the residency index stays."""

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict

from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf, etag
from gateway.api.admin.routes import admin_routes
from gateway.errors import NotFoundError
from gateway.fleet.config_sync import ConfigSync
from gateway.routing import POLICIES
from gateway.state import Document, Kind
from gateway.state.fleet_bodies import ROUTING_NAME, PolicyName, RoutingBody
from gateway.state.stored import read


class RoutingView(BaseModel):
    """The policy and the assumptions that hold now; ``version`` is None where the settings' hold."""

    model_config = ConfigDict(frozen=True)

    policy: PolicyName
    prefill_tokens_per_s: float
    decode_load_s: float
    spread: float
    version: int | None
    policies: list[str]


def routing_router(changes: Changes, keeper: ConfigSync) -> APIRouter:
    """Return the routes."""
    router = admin_routes("routing")
    store = changes.store

    def view(document: Document | None) -> RoutingView:
        policy, costs = keeper.routing_of(None if document is None else read(RoutingBody, document))
        return RoutingView(
            policy=policy,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
            decode_load_s=costs.decode_load_s,
            spread=costs.spread,
            version=None if document is None else document.version,
            policies=list(POLICIES),
        )

    @router.get("/routing")
    async def get_routing(response: Response) -> RoutingView:
        """How instances are chosen now."""
        document = await store.document(Kind.ROUTING, ROUTING_NAME)
        if document is not None:
            response.headers["etag"] = etag(document)
        return view(document)

    @router.put("/routing", response_model=RoutingView)
    async def put_routing(body: RoutingBody, mutation: MutationOf) -> Response:
        """Choose by another policy from the next request on; other gateways follow within ``store_poll_s``."""
        return await changes.put(Kind.ROUTING, ROUTING_NAME, body, mutation=mutation, target="routing", view=view)

    @router.delete("/routing", status_code=204)
    async def delete_routing(mutation: MutationOf) -> Response:
        """Restore the routing policy of the settings."""
        return await changes.delete(
            Kind.ROUTING,
            ROUTING_NAME,
            mutation=mutation,
            target="routing",
            missing=lambda: NotFoundError("no routing is stored: the settings apply", code="routing_not_found"),
        )

    return router
