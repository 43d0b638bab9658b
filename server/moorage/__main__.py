"""`moored`: `main` is its entry point."""

from moorage.launch import run_program


def main() -> None:
    """Run the command line."""
    run_program("moored", "moorage.commands.program")


if __name__ == "__main__":
    main()
