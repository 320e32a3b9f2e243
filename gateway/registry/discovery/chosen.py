"""From settings to watchers."""

from collections.abc import Sequence

from gateway.registry.discovery.base import Watcher
from gateway.registry.discovery.dns import DnsQuery, DnsWatcher
from gateway.registry.discovery.file import FileWatcher
from gateway.registry.discovery.kubernetes import KubernetesAccess, KubernetesWatcher, ServicePort
from gateway.settings.fleet import FleetSettings


def chosen_watchers(settings: FleetSettings) -> Sequence[Watcher]:
    """Return a watcher for each way of discovery that is set up; none by default."""
    watchers: list[Watcher] = []
    if settings.discovery_file is not None:
        watchers.append(FileWatcher(settings.discovery_file, interval_s=settings.discovery_interval_s))
    if settings.discovery_dns:
        queries = [
            DnsQuery(name=each.name, record=each.record, port=each.port or 0, scheme=each.scheme)
            for each in settings.discovery_dns
        ]
        watchers.append(
            DnsWatcher(queries, interval_s=settings.discovery_interval_s, servers=settings.discovery_dns_servers)
        )
    if (cluster := settings.discovery_kubernetes) is not None:
        watchers.append(
            KubernetesWatcher(
                ServicePort(
                    namespace=cluster.namespace, service=cluster.service, port=cluster.port, scheme=cluster.scheme
                ),
                KubernetesAccess(url=cluster.api_url, token_file=cluster.token_file, ca_file=cluster.ca_file),
            )
        )
    return watchers
