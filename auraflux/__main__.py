"""`python -m auraflux` is the same as the command `auraflux`."""

from auraflux.interrupt import INTERRUPTED, exit_interrupted, leave_when_interrupted, repeat_lost_interrupts


def run() -> None:
    """Run the command line; interrupts end it without a traceback."""
    leave_when_interrupted()
    repeat_lost_interrupts()
    from auraflux.cli import main

    try:
        main(prog_name="auraflux")
    except SystemExit as err:
        leave_when_interrupted()
        if err.code == INTERRUPTED:
            exit_interrupted()
        raise


if __name__ == "__main__":
    run()
