"""The metrics catalogue: every series of gateway and engines, declared once, as data."""

from kvcontrol.series.engine import ENGINE
from kvcontrol.series.gateway import GATEWAY
from kvcontrol.series.labels import LABELS, MOST_MODELS, MOST_TENANTS, OTHER
from kvcontrol.series.lmdeploy import LMDEPLOY
from kvcontrol.series.series import Kind, Series, Unit

__all__ = ["ENGINE", "GATEWAY", "LABELS", "LMDEPLOY", "MOST_MODELS", "MOST_TENANTS", "OTHER", "Kind", "Series", "Unit"]
