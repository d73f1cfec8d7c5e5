"""The `tureen` command: `command_line.py` reads it, each file of `commands` is one subcommand.

Imports: config, contract, errors, files, offline, sandbox, settings; asyncio, msgspec, prompt_toolkit, tqdm.
Imported by: __main__, launch_server.
"""
