"""The status page: its files, and the fleet as everybody may see it."""

from gateway.dashboard.assets import Asset, Assets
from gateway.dashboard.fleet import FleetBoard, FleetView

__all__ = ["Asset", "Assets", "FleetBoard", "FleetView"]
