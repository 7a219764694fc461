"""``python -m expertwire``: the command line."""

from __future__ import annotations

from expertwire.cli import main

if __name__ == "__main__":
    main()
