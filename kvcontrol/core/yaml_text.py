"""YAML by PyYAML's safe rules, with one kind of error for whatever can't be read.

PyYAML raises its own for text that is no YAML. A value that is none of its kind (``2001-13-45``, ``!!int many``, a
number of 5,000 digits) ends in whatever Python raises for it, and nesting without an end in a ``RecursionError``: both
would end a command in a traceback, and a request in a 500.
"""

from typing import Final

import yaml

NO_SUCH_VALUE: Final = (ValueError, LookupError, ArithmeticError, AttributeError, TypeError)
"""What PyYAML lets through for a scalar that it can't make a value of."""

TOO_DEEP: Final = "it is nested too deeply"


def load_yaml(text: str | bytes) -> object:
    """Return what YAML says; raises ``yaml.YAMLError``."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError(TOO_DEEP) from None
    except NO_SUCH_VALUE as error:
        raise yaml.YAMLError(f"it has a value that is none of its kind ({error})") from error


__all__ = ["NO_SUCH_VALUE", "TOO_DEEP", "load_yaml"]
