"""The status page."""

from gateway.dashboard.page import status_page

__all__ = ["status_page"]
