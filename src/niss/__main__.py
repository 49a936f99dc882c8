"""`python -m niss` is the command `niss`."""

from niss.cli import main

if __name__ == "__main__":
    main()
