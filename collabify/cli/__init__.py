"""The command line: one command a file. Only here is anything printed."""
