"""`python -m auraflux` is the same as the command `auraflux`."""

import signal
import sys


def run() -> None:
    """Run the command line; an interrupt while it is still being imported ends quietly, too."""
    try:
        from auraflux.cli import main
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    main(prog_name="auraflux")


if __name__ == "__main__":
    run()
