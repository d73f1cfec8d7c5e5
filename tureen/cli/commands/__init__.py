"""A file a subcommand: its name is the subcommand's, HELP one line, add_flags(parser) and run(options) the rest."""
