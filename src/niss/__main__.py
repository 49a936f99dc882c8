"""`python -m niss`: the command line, in the same environment as this Python."""

from niss.cli import main

if __name__ == "__main__":
    main()
