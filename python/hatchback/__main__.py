"""`python -m hatchback`: the program `hatchback`."""

from . import main

if __name__ == "__main__":
    main()
