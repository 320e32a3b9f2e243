"""``/admin/v1``: changes of operators at run time. One file for each resource, wired in ``router``."""

from gateway.api.admin.access import AdminAccess, AdminRoute
from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import Mutation
from gateway.api.admin.router import add_failure_handlers, admin_routers

__all__ = ["AdminAccess", "AdminRoute", "Changes", "Mutation", "add_failure_handlers", "admin_routers"]
