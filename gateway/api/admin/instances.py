"""``/admin/v1/instances``: the instances of the fleet and their state.

Two kinds of changes. What an operator says (a new instance, a drain) is a document: durable, audited, with an ETag, and
the same for all gateways of one store. What an instance says of itself is a lease: renewed every few seconds, forgotten
when it isn't, with a key of its own.
"""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.admin.access import RegistrationRoute
from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import Mutation, MutationOf, etag, expected_of, must
from gateway.api.admin.routes import admin_routes
from gateway.errors import ConflictApiError, InvalidRequestError, NotFoundError
from gateway.http.endpoint import endpoint_of, serves
from gateway.placement.planner import Planner
from gateway.registry import BreakerState, Instance, LoadTracker, Membership, Registry, Source
from gateway.registry.addresses import AddressError, AddressRules
from gateway.registry.leases import Leases
from gateway.state import ABSENT, Document, Kind, Put
from gateway.state.bodies import NAME_PATTERN, Name
from gateway.state.fleet_bodies import InstanceBody, Url
from gateway.state.stored import read, written
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole, KVTransport

Server = tuple[str, int | None]
"""Where a server listens, as ASGI says it: a host and a port, none for a socket in the file system."""

InstanceName = Annotated[str, Path(pattern=NAME_PATTERN, description="An instance's id.")]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


class SpeedsView(_View):
    """Measured speeds of an instance."""

    prefill_tokens_per_s: float
    base_s: float
    decode_load_s: float
    answer_s: float


class InstanceView(_View):
    """One instance as this gateway sees it now."""

    id: str
    url: str
    source: Source
    state: str
    role: EngineRole | None = Field(
        description="Role: hybrid, prefill (computes prompts for others) or decode; null while unknown."
    )
    reason: str
    draining: bool
    leaving: bool = Field(description="Whether the instance is removed after its requests in flight.")
    breaker: BreakerState
    breaker_reason: str
    models: list[str]
    blocks: str
    in_flight: int
    foreign_requests: int
    lease_left_s: float | None = Field(description="Seconds until a self-registered one must have renewed its lease.")
    speeds: SpeedsView | None


class InstanceList(_View):
    """All instances."""

    data: list[InstanceView]


class NewInstanceBody(BaseModel):
    """An instance to take in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Name
    url: Url
    role: EngineRole | None = Field(
        None, description="Role where prompts go through the tiers; null: the instance's own report."
    )


class InstanceChange(_View):
    """An instance's document after a change. The instance itself follows at once; read it to see how it is."""

    id: str
    url: str | None
    draining: bool
    role: EngineRole | None
    version: int


class LeaseBody(BaseModel):
    """An instance's registration of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Url
    ttl_s: float = Field(15.0, ge=1, le=3600, description="Duration of the lease without renewal, in seconds.")


class InstanceViews:
    """Dependencies of the routes."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        registry: Registry,
        membership: Membership,
        load: LoadTracker,
        planner: Planner,
        leases: Leases,
        rules: AddressRules,
        own: Server,
    ) -> None:
        self.registry = registry
        self.membership = membership
        self.load = load
        self.planner = planner
        self.leases = leases
        self.rules = rules
        self._own = own

    def get(self, name: str) -> Instance:
        """Return an instance; raises ``NotFoundError``."""
        instance = InstanceId(name)
        if not self.registry.knows(instance):
            raise NotFoundError(f"unknown instance {name!r}", code="instance_not_found")
        return self.registry.get(instance)

    def view(self, each: Instance) -> InstanceView:
        speeds = self.planner.speeds(each)
        return InstanceView(
            id=each.id,
            url=each.url,
            source=each.source,
            state=each.state,
            role=each.known_role,
            reason=each.reason,
            draining=each.draining,
            leaving=self.membership.leaving(each.id),
            breaker=self.registry.breakers.state(each.id),
            breaker_reason=self.registry.breakers.reason(each.id),
            models=[model.id for model in each.models],
            blocks=each.blocks,
            in_flight=self.load.of(each.id).in_flight,
            foreign_requests=each.foreign_requests,
            lease_left_s=self.leases.left_s(each.id),
            speeds=None
            if speeds is None
            else SpeedsView(
                prefill_tokens_per_s=speeds.prefill_tokens_per_s,
                base_s=speeds.base_s,
                decode_load_s=speeds.decode_load_s,
                answer_s=speeds.answer_s,
            ),
        )

    async def vetted(self, url: str, requested: Server | None) -> str:
        """Return a URL as the origin that it is; raises ``InvalidRequestError`` for one that may not be used.
        ``requested`` is the address of ours that it was said at.
        """
        try:
            origin = await self.rules.vetted(url)
        except AddressError as error:
            raise InvalidRequestError(f"url: {error}", param="url", code="address_not_allowed") from None
        for own in (self._own, requested):
            if own is not None and own[1] and serves(own[0], own[1], endpoint_of(origin)):
                raise InvalidRequestError(
                    f"url: {origin} is this gateway itself", param="url", code="address_not_allowed"
                )
        return origin


class InstanceChanges:
    """Changes of an instance's document."""

    def __init__(self, changes: Changes, views: InstanceViews) -> None:
        self._changes = changes
        self._views = views

    async def put(  # noqa: PLR0913 - each call names them
        self,
        name: str,
        made: Callable[[Document | None], InstanceBody],
        mutation: Mutation,
        *,
        verb: str,
        expected: Callable[[Document | None], int | None] | None = None,
        status: int = 200,
    ) -> Response:
        """Store what ``made`` makes of an instance's document, on the version that is ``expected`` of it."""

        async def attempt() -> Response:
            if (replayed := await self._changes.replayed(mutation)) is not None:
                return replayed
            present = await self._changes.store.document(Kind.INSTANCE, name)
            body = made(present)
            wanted = expected_of(mutation, InstanceBody, present) if expected is None else expected(present)
            return await self._changes.apply(
                [Put(kind=Kind.INSTANCE, name=name, body=written(body, present), expected=wanted)],
                mutation=mutation,
                action=mutation.action(verb, f"instances/{name}", body.model_dump(mode="json")),
                status=status,
                shown=lambda documents: _change(must(documents[0])).model_dump(mode="json"),
            )

        return await (attempt() if verb == "create" else self._changes.carried_out(attempt))

    async def set_draining(self, name: str, mutation: Mutation, *, draining: bool) -> Response:
        def made(present: Document | None) -> InstanceBody:
            if present is None:
                self._views.get(name)
            changed = InstanceBody() if present is None else read(InstanceBody, present)
            return changed.model_copy(update={"draining": draining})

        verb = "drain" if draining else "resume"
        return await self.put(name, made, mutation, verb=verb, expected=mutation.expected_as_read)


def instances_router(changes: Changes, views: InstanceViews) -> APIRouter:
    """Return the routes of operators."""
    router = admin_routes("instances")
    store = changes.store

    documents = InstanceChanges(changes, views)

    @router.get("/instances")
    async def list_instances() -> InstanceList:
        """All instances from every source."""
        return InstanceList(data=[views.view(each) for each in views.registry.all()])

    @router.get("/instances/{name}")
    async def get_instance(name: InstanceName, response: Response) -> InstanceView:
        """One instance. Its ETag is that of its document, where it has one."""
        found = views.get(name)
        document = await store.document(Kind.INSTANCE, name)
        if document is not None:
            response.headers["etag"] = etag(document)
        return views.view(found)

    _add_puts(router, changes, views, documents)

    @router.delete("/instances/{name}", status_code=204)
    async def delete_instance(name: InstanceName, mutation: MutationOf) -> Response:
        """Remove an instance: it receives no new requests, drains, and is forgotten then.

        What the settings or a discovery name comes back from there; drain that instead.
        """

        def named_elsewhere() -> ConflictApiError:
            source = views.get(name).source
            return ConflictApiError(f"instance {name!r} is named by {source}: take it out there, or drain it here")

        return await changes.delete(
            Kind.INSTANCE, name, mutation=mutation, target=f"instances/{name}", missing=named_elsewhere
        )

    @router.post("/instances/{name}/drain", response_model=InstanceChange)
    async def drain(name: InstanceName, mutation: MutationOf) -> Response:
        """Send an instance of any source no new requests until it is resumed; requests in flight continue."""
        return await documents.set_draining(name, mutation, draining=True)

    @router.post("/instances/{name}/resume", response_model=InstanceChange)
    async def resume(name: InstanceName, mutation: MutationOf) -> Response:
        """Give a drained instance requests again."""
        return await documents.set_draining(name, mutation, draining=False)

    return router


def _add_puts(router: APIRouter, changes: Changes, views: InstanceViews, documents: InstanceChanges) -> None:
    @router.post("/instances", status_code=201, response_model=InstanceChange)
    async def post_instance(body: NewInstanceBody, mutation: MutationOf) -> Response:
        """Take in an instance: checked from now on, used once it is healthy. 409 when its id or address is taken."""
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        url = await views.vetted(body.url, mutation.server)
        _check_free(views, body.id, url)
        stored = InstanceBody(url=url, role=body.role)
        return await documents.put(
            body.id, lambda _: stored, mutation, verb="create", expected=lambda _: ABSENT, status=201
        )

    @router.put("/instances/{name}", response_model=InstanceChange)
    async def put_instance(name: InstanceName, body: InstanceBody, mutation: MutationOf) -> Response:
        """Replace the data of an instance. Another address is another process: the former one drains first.

        A role holds from the next request on where prompts go through the tiers. LMDeploy's own roles are an engine's
        for its life: another is refused with a 409.
        """
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        if body.role is not None and views.registry.knows(InstanceId(name)):
            _check_role(views.registry.get(InstanceId(name)), body)
        if body.url is None:
            views.get(name)
            return await documents.put(name, lambda _: body, mutation, verb="put")
        url = await views.vetted(body.url, mutation.server)
        _check_free(views, name, url)
        stored = body.model_copy(update={"url": url})
        return await documents.put(name, lambda _: stored, mutation, verb="put")


def leases_router(views: InstanceViews) -> APIRouter:
    """Return the routes by which instances register themselves."""
    router = admin_routes("instances", RegistrationRoute)

    @router.put("/instances/{name}/lease")
    async def put_lease(name: InstanceName, body: LeaseBody, request: Request) -> InstanceView:
        """Register an instance, or renew its lease: to be repeated several times within ``ttl_s``."""
        url = await views.vetted(body.url, request.scope.get("server"))
        try:
            return views.view(await views.leases.renew(InstanceId(name), url, ttl_s=body.ttl_s))
        except ValueError as error:
            raise ConflictApiError(str(error)) from None

    @router.delete("/instances/{name}/lease", status_code=204)
    async def delete_lease(name: InstanceName) -> None:
        """Deregister an instance: it receives no new requests, and is forgotten when its requests have ended."""
        instance = InstanceId(name)
        if views.leases.left_s(instance) is None:
            raise NotFoundError(f"instance {name!r} has no lease", code="lease_not_found")
        await views.leases.end(instance)

    return router


def _change(document: Document) -> InstanceChange:
    body = read(InstanceBody, document)
    return InstanceChange(
        id=document.name, url=body.url, draining=body.draining, role=body.role, version=document.version
    )


def _check_role(instance: Instance, body: InstanceBody) -> None:
    """Raise ``ConflictApiError`` for a role that this process can't have."""
    stats, role = instance.stats, body.role
    if stats is None or role is None or (body.url is not None and instance.endpoint != endpoint_of(body.url)):
        return
    if stats.role is not EngineRole.HYBRID and role is not stats.role:
        raise ConflictApiError(
            f"role: {instance.id} is a {stats.role} instance for its life: LMDeploy builds its scheduler by the role, "
            f"when it starts. Take it out (DELETE), start it again with --role {role}, and add it",
            code="role_is_fixed",
        )
    if stats.role is EngineRole.HYBRID and role is not EngineRole.HYBRID and KVTransport.TIERS not in stats.transports:
        raise ConflictApiError(
            f"role: {instance.id} is a hybrid instance that hands no prompts over. Start it again with tiers and "
            "KVGATE_ENGINE_PD_TRANSPORT=tiers, whose roles change at run time, or take it out (DELETE), start it with "
            f"--role {role}, and add it",
            code="role_is_fixed",
        )


def _check_free(views: InstanceViews, name: str, url: str) -> None:
    for each in views.registry.all():
        if each.id == name and each.source is not Source.ADMIN:
            raise ConflictApiError(f"instance id {name!r} is taken by an instance from {each.source}")
        if each.endpoint == endpoint_of(url) and each.id != name:
            raise ConflictApiError(f"{url} is the address of instance {each.id!r}")
