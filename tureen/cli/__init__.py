"""The `tureen` command: `command_line.py` reads it, each file of `commands` is one subcommand.

Imports: config, errors; msgspec.
Imported by: __main__, launch_server.
"""
