"""The entry point of the program `moored`."""

from moorage.launch import run_program


def main() -> None:
    """Run the command line of `moored`."""
    run_program("moored", "moorage.commands.program")


if __name__ == "__main__":
    main()
