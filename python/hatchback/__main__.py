"""`python -m hatchback`: the program `hatchback`."""

from . import main

main()
