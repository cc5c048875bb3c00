"""The entry point of the command `harmonium`."""

import os


def main() -> None:
    """Run the command line; OpenMP's way of waiting must be set before torch is loaded."""
    # Threads that spin while they wait cost more than they give on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from harmonium.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
