"""`python -m offbeat` is the command line."""

from offbeat.cli import main

main()
