"""`python -m bertkit` is the command line."""

from bertkit.cli import program

if __name__ == "__main__":
    program()
