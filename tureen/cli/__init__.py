"""The `tureen` command: `command_line.py` reads it, each file of `commands` is one subcommand.

Imports: config, config_sources, contract, errors, extras, files, log, offline, sandbox, temporary_folder; asyncio,
msgspec, prompt_toolkit, tqdm.
Imported by: nothing.
"""
