"""``python -m collabify``."""

from collabify.cli.app import main

main()
