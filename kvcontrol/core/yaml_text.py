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

_MOST_BITS: Final = 1024
"""Of a whole number, about as many as the largest fraction has. Python refuses to write very long ones: into a
complaint, for instance.
"""


class Loader(yaml.SafeLoader):
    """PyYAML's safe rules, with an end to whole numbers."""

    def whole_number(self, node: yaml.ScalarNode) -> int:
        """Make a whole number; ``ValueError`` for one that is too long."""
        number = int(self.construct_yaml_int(node))
        if number.bit_length() > _MOST_BITS:
            raise ValueError(f"a whole number of more than {_MOST_BITS} bits")
        return number


Loader.add_constructor("tag:yaml.org,2002:int", Loader.whole_number)


def load_yaml(text: str | bytes) -> object:
    """Return what YAML says; raises ``yaml.YAMLError``."""
    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe one
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError(TOO_DEEP) from None
    except NO_SUCH_VALUE as error:
        raise yaml.YAMLError(f"invalid value ({error})") from error
