"""The ``kvgate`` command: runs one command, and turns a refusal into a message and exit code 1."""

import sys

from kvgate.failure import INTERRUPTED, CommandError
from kvgate.programs import PROGRAMS, become


def main() -> None:
    """Run one command and exit."""
    if len(sys.argv) > 1 and sys.argv[1] in PROGRAMS:
        become(sys.argv[1], sys.argv[2:])
    try:
        from kvgate.app import build_app

        build_app()(prog_name="kvgate")
    except CommandError as error:
        from kvgate.display import show_failure

        show_failure(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
