"""`python -m flatout` and the `flatout` command: parse, call, and print errors in three parts."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from flatout.cli import flatout

        code = flatout.main(standalone_mode=True)
    except KeyboardInterrupt:  # before the command line is there to answer it
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
