"""`python -m flatout` and the `flatout` command: parse, call, and print errors in three parts."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from flatout.cli import flatout

    sys.exit(flatout.main(standalone_mode=True))


if __name__ == "__main__":
    main()
