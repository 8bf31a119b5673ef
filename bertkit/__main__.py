"""`python -m bertkit` is the command line."""

from bertkit.cli import main

if __name__ == "__main__":
    main()
