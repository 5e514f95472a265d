"""`python -m modenorm` and the `modenorm` command: the laboratory's command line."""

import sys


def main() -> None:
    """Run the command line, or say which packages it needs."""
    try:
        try:
            from modenorm.lab.cli import main as run
        except ModuleNotFoundError as missing:
            sys.exit(f"modenorm's command line needs {missing.name!r}: pip install 'modenorm[lab]'")
        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
