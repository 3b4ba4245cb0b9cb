"""`python -m nestling` is the command `nestling`."""

from nestling.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
