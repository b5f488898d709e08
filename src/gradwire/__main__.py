"""`python -m gradwire` is the `gradwire` command."""

from gradwire.cli import main

main()
