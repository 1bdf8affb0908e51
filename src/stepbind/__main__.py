"""`python -m stepbind`."""

from stepbind.cli import main

main()
