"""Constructs what exists before the event loop runs: secrets, the tokenizer, stores, and who may call what."""

import secrets
from dataclasses import dataclass

from gateway.admission import Authenticator
from gateway.api.browsers import Hosts, hosts_of
from gateway.api.operators import OperatorAccess
from gateway.dashboard import Assets
from gateway.fingerprint import ModelTokenizer, load_tokenizer
from gateway.http.shutdown import Shutdown
from gateway.http.via import Via
from gateway.settings import Settings
from gateway.state import load_admin_key, load_salt_secret
from gateway.state.shared_clock import SharedClock
from gateway.telemetry import Traces, open_traces
from gateway.telemetry.siblings import Siblings
from gateway.wiring.shared import Shared, open_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Components that stand on the settings alone. ``shared`` has to be closed, and ``traces`` where there are any."""

    settings: Settings
    siblings: Siblings | None
    tokenizer: ModelTokenizer | None
    admin_key: str
    clock: SharedClock
    authenticator: Authenticator
    hosts: Hosts
    operators: OperatorAccess
    shared: Shared
    assets: Assets
    shutdown: Shutdown
    traces: Traces | None
    via: Via


def open_base(settings: Settings, siblings: Siblings | None) -> Base:
    """Read tokenizer and secrets and open the stores, which takes seconds; raises ``StartupError``."""
    access, state = settings.access, settings.state
    salt_secret = access.salt_secret.get_secret_value().encode() if access.salt_secret else None
    if salt_secret is None:
        salt_secret = load_salt_secret(state.state_dir)
    folder = settings.requests.tokenizer
    tokenizer = None if folder is None else load_tokenizer(folder, settings.requests.tokenizer_memory_bytes)
    admin_key = access.admin_key.get_secret_value() if access.admin_key else load_admin_key(state.state_dir)
    clock = SharedClock()
    hosts = Hosts([settings.server.host, *hosts_of(access.cors_origins)])
    metrics_key = [access.metrics_key.get_secret_value()] if access.metrics_key else []
    return Base(
        settings=settings,
        siblings=siblings,
        tokenizer=tokenizer,
        admin_key=admin_key,
        clock=clock,
        authenticator=Authenticator(
            access.api_keys,
            salt_secret=salt_secret,
            require_keys=access.require_keys,
            admin_key=admin_key,
            clock=clock,
        ),
        hosts=hosts,
        operators=OperatorAccess([] if settings.operators_open else [admin_key, *metrics_key], hosts=hosts),
        shared=open_shared(state),
        assets=Assets(),
        shutdown=Shutdown(),
        traces=open_traces(settings.telemetry.otlp_endpoint),
        via=Via(secrets.token_hex(4) if siblings is None else siblings.name),
    )
