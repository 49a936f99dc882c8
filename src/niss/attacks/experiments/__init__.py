"""One file per `niss attack` command: its settings, and what it tries in which order."""
