"""The entry point of the command `harmonium`."""

import os


def main() -> None:
    """Run the command line; these settings must be there before torch is loaded."""
    # Threads that spin while they wait cost more than they give on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from harmonium.cli.main import main as command_line
    from harmonium.core.allocator import keep_freed_memory

    keep_freed_memory()

    command_line()


if __name__ == "__main__":
    main()
