"""The subcommands of ``kvgate bench`` by subject: options in, a report out."""
