"""Sources of instances: each watches one place and yields the whole set at every change."""

from gateway.registry.discovery.base import DiscoveryError, DiscoveryLoop
from gateway.registry.discovery.chosen import chosen_watchers
from gateway.registry.discovery.dns import DnsQuery, DnsWatcher
from gateway.registry.discovery.file import FileWatcher
from gateway.registry.discovery.kubernetes import KubernetesAccess, KubernetesWatcher, ServicePort

__all__ = [
    "DiscoveryError",
    "DiscoveryLoop",
    "DnsQuery",
    "DnsWatcher",
    "FileWatcher",
    "KubernetesAccess",
    "KubernetesWatcher",
    "ServicePort",
    "chosen_watchers",
]
