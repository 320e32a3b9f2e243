"""Statuses that every answer is compared with, as plain numbers.

Each look-up of a member of ``HTTPStatus`` in its class is a function call.
"""

from http import HTTPStatus
from typing import Final

NO_CONTENT: Final = int(HTTPStatus.NO_CONTENT)
BAD_REQUEST: Final = int(HTTPStatus.BAD_REQUEST)
INTERNAL_SERVER_ERROR: Final = int(HTTPStatus.INTERNAL_SERVER_ERROR)
