"""`python -m engine` and the installed `engine` command. Says what to install when only the client is."""

import sys


def main() -> None:
    """Run the command line. Exits with 69 when the server's packages are not there."""
    try:
        from engine.cli import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"engine: {error.name} is not installed; the server needs: pip install 'engine[server]'\n")
        sys.exit(69)
    run()


if __name__ == "__main__":
    main()
