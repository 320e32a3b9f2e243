"""The legs of a separated plan before its answer: a prompt is computed at one instance, and the answering instance is
told where to fetch it. By LMDeploy's migration it is held under a ticket there, until it is fetched or its lease ends;
through the tiers its blocks have names of their own, and stay in the cache of both.

The prompt's instance gets the very request that the other will answer, with another header; it computes one token of
it. Whatever goes wrong there costs the time that it took and not the request: the answering instance then computes the
prompt itself, as it does when it can't fetch it.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from gateway.execution.legs import EngineCall, LegRunner
from gateway.http.headers import Header
from gateway.registry import Instance, Registry
from gateway.upstream import FailureKind, Opening, UpstreamClient, UpstreamFailureError
from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, Load, PdDuty, Save, new_ticket, parse_endpoint
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import Leg, LegKind

_HEADER = PD_HEADER.encode()
_log = logging.getLogger(__name__)


class PrefillRunner:
    """Lets an instance compute and hold a prompt; see ``LegRunner``. Never raises for the instance's failures."""

    def __init__(self, client: UpstreamClient, registry: Registry) -> None:
        self._client = client
        self._registry = registry

    async def run(self, leg: Leg, instance: Instance, call: EngineCall) -> EngineCall:
        """Return the call with where to fetch the prompt, or as it was when there is nothing to fetch."""
        endpoint = "" if instance.stats is None or instance.stats.pd is None else instance.stats.pd.endpoint
        place = parse_endpoint(endpoint)
        if place is None:
            return call
        host, port = place
        first: PdDuty
        then: PdDuty
        if leg.transport is KVTransport.TIERS:
            first, then = Save(), Load(host=host, port=port)
        else:
            ticket = new_ticket()
            first, then = Hold(ticket=ticket), Fetch(ticket=ticket, host=host, port=port)
        return _with(call, then) if await self._computed(instance, _with(call, first)) else call

    async def _computed(self, instance: Instance, call: EngineCall) -> bool:
        try:
            response = await self._client.open(
                instance.url,
                call.path,
                headers=call.headers,
                body=call.body,
                hung=partial(self._registry.checks.hung, instance.id),
                silence=None if call.opening is None else _BeforeAnswer(call.opening),
            )
            with closing(response):
                while await response.read():
                    pass
        except UpstreamFailureError as failure:
            if failure.kind is FailureKind.CONNECT:
                self._registry.checks.connection_failed(instance.id, str(failure))
            elif failure.kind is not FailureKind.NO_FILES:
                self._registry.breakers.failed(instance.id, str(failure))
            _log.warning("%s computed no prompt for %s: %s", instance.id, call.request_id, failure)
            return False
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._registry.breakers.answered_badly(instance.id, f"it answered {response.status}")
        else:
            self._registry.breakers.answered(instance.id)
        if response.status != HTTPStatus.OK:
            _log.info("%s computed no prompt for %s: it answered %d", instance.id, call.request_id, response.status)
        return response.status == HTTPStatus.OK


class _BeforeAnswer:
    """A client's opening while its prompt is computed: what comes of that is no part of its answer."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self.after_s = opening.after_s

    async def headed(self, status: int, headers: Sequence[Header]) -> None:
        """Ignore the leg's head."""
        del status, headers

    async def silent(self) -> None:
        await self._opening.silent()


class HandoverRunner:
    """Nothing to call: the answering instance fetches by itself; see ``LegRunner``."""

    async def run(self, leg: Leg, instance: Instance, call: EngineCall) -> EngineCall:
        """Return the call as it is."""
        del leg, instance
        return call


def _with(call: EngineCall, duty: PdDuty) -> EngineCall:
    return replace(call, headers=(*call.headers, (_HEADER, str(duty).encode())))


def leg_runners(client: UpstreamClient, registry: Registry) -> dict[LegKind, LegRunner]:
    """Return who carries out the legs before an answer."""
    return {LegKind.PREFILL: PrefillRunner(client, registry), LegKind.HANDOVER: HandoverRunner()}
